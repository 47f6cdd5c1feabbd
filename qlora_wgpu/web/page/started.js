/* Not a module: it runs where the page's modules do not load, and says so. */
addEventListener(
  'error',
  (event) => {
    const told = document.getElementById('told');
    if (!told || !told.hidden) return;
    const file = event.target.src ? new URL(event.target.src).pathname.split('/').pop() : '';
    const why = event.message || `${file} or a file that it needs is missing, or not sent as text/javascript`;
    told.textContent = `The page does not run (${why}): copy the site again, to a server that knows .mjs files.`;
    told.hidden = false;
    document.getElementById('subtitle').textContent = '';
  },
  true, // what fails to load does not bubble
);
