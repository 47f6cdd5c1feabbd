/**
 * A module worker under the page's own Content-Security-Policy. One whose script is a file has the policy that the
 * server sends with that file, and static servers send none: it might talk to anybody. A blob's is the page's.
 *
 * What the module imports may not load, and Firefox tells nobody: so it is imported here, where it is seen. What comes
 * before it has loaded waits.
 */
export function sealedWorker(name) {
  const source = `
    const early = [];
    self.onmessage = (event) => early.push(event);
    import(${JSON.stringify(new URL(name, import.meta.url).href)}).then(
      () => early.forEach((event) => self.onmessage(event)),
      (error) => postMessage({ broken: error.message }),
    );`;
  return new Worker(URL.createObjectURL(new Blob([source], { type: 'text/javascript' })), { type: 'module' });
}
