/** Files that are dropped anywhere on the page. */

/**
 * @param {HTMLElement} area What shows that a file may be dropped.
 * @param {(files: File[]) => void} took
 */
export function droppable(area, took) {
  for (const kind of ['dragover', 'dragleave', 'drop']) {
    document.addEventListener(kind, (event) => {
      if (!event.dataTransfer.types.includes('Files') && event.target.matches?.('input, textarea')) return; // a text, for the field
      event.preventDefault();
      area.classList.toggle('over', kind === 'dragover');
      if (kind === 'drop' && event.dataTransfer.files.length) took([...event.dataTransfer.files]);
    });
  }
}
