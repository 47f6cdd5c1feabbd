/** Questions to the worker and their answers. */

export class Requests {
  /**
   * @param {Worker} worker
   * @param {(news: object) => void} heard What it tells by itself.
   */
  constructor(worker, heard) {
    this.worker = worker;
    this.waiting = new Map();
    this.next = 0;
    worker.onmessage = ({ data }) => {
      if (data.news) return heard(data.news);
      const { resolve, reject } = this.waiting.get(data.id);
      this.waiting.delete(data.id);
      return data.error ? reject(new Error(data.error)) : resolve(data.answer);
    };
    worker.onerror = (event) => {
      const error = new Error(`The page's worker ended: ${event.message ?? 'this browser does not run it'}. Reload the page.`);
      for (const { reject } of this.waiting.values()) reject(error);
      this.waiting.clear();
    };
  }

  /** What the worker answers. */
  ask(name, given) {
    const id = this.next++;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.worker.postMessage({ id, do: name, ...given });
    });
  }
}
