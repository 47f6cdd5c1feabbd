/** Snapshots of the training in the browser's private storage, for after a reload or a lost GPU. */

import { Told } from './device.mjs';
import { sha256 } from './digest.mjs';

const VECTORS = ['parameters', 'first_moment', 'second_moment'];

/** One snapshot of one site, in the origin's private file system. */
export class Snapshots {
  /**
   * @param {string} name Tells one site's snapshots from another's.
   * @param {string} family How the names begin that the site had before it was written again, too.
   * @param {StorageManager} storage navigator.storage.
   * @param {LockManager} locks navigator.locks, if the browser has them.
   */
  constructor(name, family, storage, locks) {
    Object.assign(this, { name, family, storage, locks, owns: false });
  }

  /** Whether it is this tab that keeps snapshots: the first one that began to, as long as it is open. */
  async _own() {
    if (!this.owns && this.locks) {
      this.owns = await new Promise((resolve, reject) => {
        const held = (lock) => {
          resolve(lock !== null);
          return lock && new Promise(() => {}); // until the worker ends
        };
        this.locks.request(this.name, { ifAvailable: true }, held).catch(reject);
      });
    }
    return this.owns || !this.locks;
  }

  async _folder(create) {
    const root = await this.storage.getDirectory();
    return root.getDirectoryHandle(this.name, { create });
  }

  /**
   * Keeps a snapshot; the one before stays until this one is whole, and what was cut off is not the newest.
   *
   * @param {{step: number, parameters: Float32Array, first_moment: Float32Array, second_moment: Float32Array}} snapshot
   * @param {{text: string}} about The data and anything else that JSON holds.
   */
  async keep(snapshot, { text, ...about }) {
    try {
      if (!(await this._own())) {
        throw new Told('Another tab of this page saves its training in this browser: this tab continues, but a reload loses its progress.');
      }
      const folder = await this._folder(true);
      const [latest] = await this._abouts(folder);
      const [slot, serial] = latest ? [1 - latest.slot, latest.serial + 1] : [0, 0];
      const data = await this._keepText(folder, text);
      for (const vector of VECTORS) await write(folder, `${vector}.${slot}`, snapshot[vector]);
      const { step, tokens, parameters } = snapshot;
      const whole = { ...about, step, tokens, slot, serial, floats: parameters.length, text: data };
      await write(folder, `about.${slot}`, new TextEncoder().encode(JSON.stringify(whole)));
      if (latest && latest.text !== data) await folder.removeEntry(latest.text).catch(() => {});
      await this._removeEarlier().catch(() => {}); // what is new is kept all the same
    } catch (error) {
      if (error instanceof Told) throw error;
      if (error.name === 'QuotaExceededError') {
        throw new Told('The browser has no space for a snapshot: training continues, but a reload loses its progress. Free some disk space.');
      }
      throw new Told(`The snapshot could not be saved (${error.message}): training continues, but a reload loses its progress.`);
    }
  }

  /** Writes the data once, under a name of its content. */
  async _keepText(folder, text) {
    if (this.text !== text) {
      const content = new TextEncoder().encode(text);
      const name = `data.${(await sha256(content)).slice(0, 16)}`;
      await write(folder, name, content);
      Object.assign(this, { text, textName: name });
    }
    return this.textName;
  }

  /** The names under which the site kept something before it was written again. */
  async earlier() {
    const found = [];
    try {
      for await (const name of (await this.storage.getDirectory()).keys()) if (name.startsWith(this.family) && name !== this.name) found.push(name);
    } catch {
      // There is no storage.
    }
    return found;
  }

  /** Removes what nobody can use any more, unless a tab that was not reloaded is at it. */
  async _removeEarlier() {
    for (const name of await this.earlier()) {
      const remove = async (lock) => lock !== null && this._remove(name);
      await (this.locks ? this.locks.request(name, { ifAvailable: true }, remove) : remove());
    }
  }

  async _remove(name) {
    const root = await this.storage.getDirectory();
    await root.removeEntry(name, { recursive: true }).catch((error) => {
      if (error.name !== 'NotFoundError') throw error;
    });
  }

  /** Removes all that the site keeps. */
  async forget() {
    if (!(await this._own())) throw new Told('Another tab of this page saves its training in this browser: close it first.');
    this.text = null;
    try {
      await this._remove(this.name);
      await this._removeEarlier();
    } catch (error) {
      throw new Told(`The saved training could not be deleted (${error.message}): clear this page's data in the browser's settings.`);
    }
  }

  /** The last snapshot with what was said about it; null if there is none that is whole. */
  async last() {
    try {
      const folder = await this._folder(false);
      for (const about of await this._abouts(folder)) {
        const found = await this._read(folder, about).catch(() => null);
        if (found) return found;
      }
    } catch {
      // There is none.
    }
    return null;
  }

  async _read(folder, about) {
    const content = async (name) => (await folder.getFileHandle(name)).getFile();
    const found = { about: { ...about, text: await (await content(about.text)).text() }, step: about.step, tokens: about.tokens };
    for (const vector of VECTORS) {
      const file = await content(`${vector}.${about.slot}`);
      if (file.size !== 4 * about.floats) return null;
      found[vector] = new Float32Array(await file.arrayBuffer());
    }
    return found;
  }

  /** What was said about each snapshot, the newest first. */
  async _abouts(folder) {
    const found = [];
    for (const slot of [0, 1]) {
      try {
        const file = await (await folder.getFileHandle(`about.${slot}`)).getFile();
        found.push(JSON.parse(await file.text()));
      } catch {
        // It was never written, or not to its end.
      }
    }
    return found.sort((a, b) => b.serial - a.serial);
  }
}

async function write(folder, name, data) {
  const handle = await folder.getFileHandle(name, { create: true });
  // Workers of all browsers have synchronous handles; Safari has no others there.
  const access = await handle.createSyncAccessHandle();
  try {
    access.truncate(0);
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    if (access.write(bytes, { at: 0 }) !== bytes.length) throw new DOMException('', 'QuotaExceededError');
    access.flush();
  } finally {
    access.close();
  }
}
