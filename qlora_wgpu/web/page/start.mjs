/** The worker's beginning: Firefox tells nobody when a module that a worker's module imports does not load. */

const early = [];
self.onmessage = (event) => early.push(event);
import('./worker.mjs').then(
  () => early.forEach((event) => self.onmessage(event)),
  (error) => postMessage({ broken: error.message }),
);
