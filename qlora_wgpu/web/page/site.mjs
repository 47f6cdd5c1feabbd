/** A site's files: fetched, and held to the hashes that were written beside them. */

import { Told } from './device.mjs';
import { sha256 } from './digest.mjs';

const FORMAT = 1;

export class SiteFiles {
  /** @param {(name: string, cache: RequestCache) => Promise<Response>} get Fetches a file of the site. */
  constructor(get) {
    this._get = get;
    this._kept = new Map();
  }

  /** Reads site.json. */
  async open() {
    const response = await this._fetched('site.json', 'no-cache');
    try {
      this.site = await response.json();
    } catch {
      throw new Told('site.json is damaged: build the site again with qlora-wgpu web.');
    }
    if (this.site.format !== FORMAT) {
      throw new Told(`This site has format ${this.site.format}, but the page supports ${FORMAT}: build it again with qlora-wgpu web.`);
    }
    return this.site;
  }

  /** Fetches small files now, so that nothing has to be asked for later. */
  async keep(names) {
    await Promise.all(names.map(async (name) => this._kept.set(name, await this.bytes(name))));
  }

  /** A file's bytes. */
  async bytes(name) {
    if (this._kept.has(name)) return this._kept.get(name);
    const content = await this._content(name, 'default');
    if (!(await this._damage(name, content))) return content;
    // It may be that of a site which was here before, and which the browser has kept.
    const fetched = await this._content(name, 'reload');
    const damage = await this._damage(name, fetched);
    if (damage) throw new Told(damage);
    return fetched;
  }

  async _content(name, cache) {
    const response = await this._fetched(name, cache);
    try {
      return await response.arrayBuffer();
    } catch (error) {
      throw new Told(`The download of ${name} is incomplete (${error.message}): check the network, and try again.`);
    }
  }

  /** What is wrong with a file's content; nothing, if it is what site.json tells of. */
  async _damage(name, content) {
    const known = this.site.files[name];
    if (content.byteLength !== known.bytes) {
      return `${name} has ${content.byteLength.toLocaleString('en')} bytes instead of ${known.bytes.toLocaleString('en')}: ` +
        'try again, or copy the site again.';
    }
    return (await sha256(content)) === known.sha256 ? null : `${name} is damaged: copy the site again.`;
  }

  /** A packed JSON file. */
  async json(name) {
    const stream = new Blob([await this.bytes(name)]).stream().pipeThrough(new DecompressionStream('gzip'));
    return new Response(stream).json();
  }

  async _fetched(name, cache) {
    let response;
    try {
      response = await this._get(name, cache);
    } catch (error) {
      throw new Told(`${name} cannot be downloaded (${error.message}): check that the server is running.`);
    }
    if (!response.ok) throw new Told(`${name} cannot be downloaded (${response.status}): copy the site again.`);
    return response;
  }
}
