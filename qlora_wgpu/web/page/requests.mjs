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
    this.ended = null;
    worker.onmessage = ({ data }) => {
      if (data.news) return heard(data.news);
      if (data.broken) return this._end(data.broken);
      const { resolve, reject } = this.waiting.get(data.id);
      this.waiting.delete(data.id);
      return data.error ? reject(new Error(data.error)) : resolve(data.answer);
    };
    worker.onerror = (event) => this._end(event.message || 'not supported by this browser');
  }

  _end(why) {
    this.ended = new Error(`The page's worker failed (${why}): reload the page, or copy the site again.`);
    for (const { reject } of this.waiting.values()) reject(this.ended);
    this.waiting.clear();
  }

  /** What the worker answers. */
  ask(name, given) {
    if (this.ended) return Promise.reject(this.ended);
    const id = this.next++;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.worker.postMessage({ id, do: name, ...given });
    });
  }
}
