/** Where training was, kept in the browser's own storage: a reload or a lost device loses nothing. */

import { Told } from './device.mjs';

const VECTORS = ['parameters', 'first_moment', 'second_moment'];

/** One snapshot of one site, in the origin's private file system. */
export class Snapshots {
  /**
   * @param {string} name Tells one site's snapshots from another's.
   * @param {StorageManager} storage navigator.storage.
   */
  constructor(name, storage) {
    this.name = name;
    this.storage = storage;
  }

  async _folder(create) {
    const root = await this.storage.getDirectory();
    return root.getDirectoryHandle(this.name, { create });
  }

  /**
   * Keeps a snapshot; the one before stays until this one is whole.
   *
   * @param {{step: number, parameters: Float32Array, first_moment: Float32Array, second_moment: Float32Array}} snapshot
   * @param {object} about Anything else that JSON holds.
   */
  async keep(snapshot, about) {
    try {
      const folder = await this._folder(true);
      const before = await this._about(folder);
      const slot = before?.slot === 0 ? 1 : 0;
      for (const vector of VECTORS) await write(folder, `${vector}.${slot}`, snapshot[vector]);
      const text = JSON.stringify({ ...about, step: snapshot.step, tokens: snapshot.tokens, slot, floats: snapshot.parameters.length });
      await write(folder, 'about.json', new TextEncoder().encode(text));
    } catch (error) {
      if (error.name === 'QuotaExceededError') {
        throw new Told('The browser has no room for a snapshot: training goes on, but a reload loses it. Free some disk space.');
      }
      throw new Told(`The snapshot could not be kept (${error.message}): training goes on, but a reload loses it.`);
    }
  }

  /** The last snapshot with what was said about it; null if there is none that is whole. */
  async last() {
    try {
      const folder = await this._folder(false);
      const about = await this._about(folder);
      if (!about) return null;
      const found = { about, step: about.step, tokens: about.tokens };
      for (const vector of VECTORS) {
        const file = await (await folder.getFileHandle(`${vector}.${about.slot}`)).getFile();
        if (file.size !== 4 * about.floats) return null;
        found[vector] = new Float32Array(await file.arrayBuffer());
      }
      return found;
    } catch {
      return null;
    }
  }

  async forget() {
    try {
      const root = await this.storage.getDirectory();
      await root.removeEntry(this.name, { recursive: true });
    } catch {
      // There was none.
    }
  }

  async _about(folder) {
    try {
      const file = await (await folder.getFileHandle('about.json')).getFile();
      return JSON.parse(await file.text());
    } catch {
      return null;
    }
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
