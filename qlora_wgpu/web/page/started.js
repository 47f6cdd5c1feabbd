/* Not a module: it runs where the page's modules do not load, and says so. */
const own = new URL('.', document.currentScript.src).href;
addEventListener(
  'error',
  (event) => {
    const from = event.filename || event.target.src || event.target.href || '';
    if (!from.startsWith(own)) return; // a browser's extension fails, not the page
    const told = document.getElementById('told');
    if (!told || !told.hidden) return;
    const file = new URL(from).pathname.split('/').pop();
    const why = event.message || `${file} or a file that it needs is missing, or not sent as text/javascript`;
    told.textContent = `The page does not run (${why}): copy the site again, to a server that knows .mjs files.`;
    told.hidden = false;
    document.getElementById('subtitle').textContent = '';
  },
  true, // what fails to load does not bubble
);
