/** Keeps the screen on while work is under way: phones and laptops that fall asleep stop a page. */

export class Awake {
  constructor() {
    Object.assign(this, { wanted: false, lock: null });
    // A page that is hidden loses its lock, and asks again when it is seen.
    document.addEventListener('visibilitychange', () => this._ask());
  }

  on() {
    this.wanted = true;
    return this._ask();
  }

  off() {
    this.wanted = false;
    this._release();
  }

  async _ask() {
    if (!this.wanted || document.visibilityState !== 'visible') return;
    try {
      const lock = await navigator.wakeLock.request('screen');
      this._release();
      this.lock = lock;
      if (!this.wanted) this._release();
    } catch {
      // A browser without locks, or a battery that is low: work goes on as long as the system lets it.
    }
  }

  _release() {
    this.lock?.release().catch(() => {});
    this.lock = null;
  }
}
