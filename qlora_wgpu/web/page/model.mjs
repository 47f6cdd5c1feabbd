/** A base with an adapter on the device: its programs, its vectors, and what is computed of them. */

import { encodeBatch } from './batches.mjs';
import { Told, cutFor, openDevice } from './device.mjs';
import { Memory } from './memory.mjs';
import { Pipelines, Program } from './program.mjs';

const STATS = 4; // loss sum, label tokens, gradient norm, update factor
const VECTORS = ['parameters', 'gradient', 'first_moment', 'second_moment'];

/** What a device says that nobody asked. */
function refusal(error) {
  if (error instanceof GPUOutOfMemoryError) {
    return `The GPU ran out of memory (${error.message}): close other tabs and programs, or train on shorter rows.`;
  }
  return `The GPU reported an error: ${error.message}`;
}

export class Model {
  /**
   * Opens a device and puts the weights onto it.
   *
   * @param {GPU} gpu navigator.gpu.
   * @param {import('./site.mjs').SiteFiles} files An open site.
   * @param {number} rank One that the site offers.
   * @param {(what: string, share: number) => void} progress
   */
  static async open(gpu, files, rank, progress = () => {}, userAgent = '') {
    const self = new Model();
    const { site } = files;
    self.files = files;
    self.site = site;
    if (!site.variants.some((each) => each.rank === rank)) throw new Told(`This site has no adapter of rank ${rank}.`);
    const { device, vendor } = await openDevice(gpu, site.needs, userAgent);
    const described = cutFor(site.variants, vendor).find((each) => each.rank === rank);
    self.device = device;
    self.errors = [];
    self.device.addEventListener('uncapturederror', ({ error }) => self.errors.push(refusal(error)));
    self.lost = null;
    self.device.lost.then((info) => (self.lost = info));
    try {
      await self._open(described, progress);
    } catch (error) {
      const lost = (await self.isLost()) && self._lostError();
      self.close(); // what it has taken of the GPU is free at once
      throw lost || error;
    }
    return self;
  }

  /** Puts everything onto the device. */
  async _open(described, progress) {
    const { files, site } = this;
    this.variant = await files.json(described.file);
    await files.keep([...Object.values(this.variant.steps), this.variant.text]);
    this.memory = new Memory(this.device, this.variant.buffers);
    this.pipelines = new Pipelines(this.device, await files.json(site.shaders));
    this.pipelines.begin(this.variant.shaders);
    this._steps = new Map();
    await this._fill(progress);
    for (const name of VECTORS) for (const [number] of this.variant.adapter[name]) await this.memory.buffer(number);
    await this.memory.buffer(this.variant.stats[0]);
    await this.memory.buffer(this.variant.step_info[0]);
    await this.memory.reserve(this.variant.slots);
    await this._begin();
    this.update = await Program.ready(this.variant.update, this.memory, this.pipelines);
    this.initial = await this.readVector('parameters');
  }

  /** Uploads the weights, a file after another. */
  async _fill(progress) {
    const names = this.site.weights;
    for (const [number, name] of names.entries()) {
      progress('weights', number / names.length);
      const content = await this.files.bytes(name);
      for (const [buffer, offset, file, begin, bytes] of this.variant.filled) {
        if (file !== number) continue;
        await this.memory.buffer(buffer);
        this.device.queue.writeBuffer(this.memory.made(buffer), offset, content, begin, Math.ceil(bytes / 4) * 4);
      }
      await this.device.queue.onSubmittedWorkDone();
    }
    progress('weights', 1);
  }

  /** Computes what of the adapter's start follows from the weights: DoRA's magnitudes. */
  async _begin() {
    for (const { program: plan, from, to: [number, offset] } of this.variant.start) {
      const program = await Program.ready(plan, this.memory, this.pipelines);
      await program.run();
      const [buffer, bytes, first] = program.window(from, this.memory);
      const encoder = this.device.createCommandEncoder();
      encoder.copyBufferToBuffer(buffer, first, this.memory.made(number), offset, bytes);
      this.device.queue.submit([encoder.finish()]);
    }
  }

  /** Ends with a sentence if the device is gone or refused something. */
  check() {
    if (this.lost) throw this._lostError();
    if (this.errors.length) throw new Told(this.errors[0]);
  }

  /** Whether it can be computed with: a device that refused something may have left something out. */
  get sound() {
    return !this.lost && !this.errors.length;
  }

  _lostError() {
    return Object.assign(new Told(`The GPU was lost (${this.lost.message || this.lost.reason}).`), { lost: true });
  }

  /** Whether the device is gone, asked when something failed: what waits on it may fail a little earlier. */
  async isLost() {
    if (!this.lost) await Promise.race([this.device.lost, new Promise((done) => setTimeout(done, 500))]);
    return this.lost !== null;
  }

  /** The programs for rows of a length, made ready the first time. */
  async steps(length) {
    if (!this._steps.has(length)) {
      const plans = await this.files.json(this.variant.steps[length]);
      const ready = {};
      for (const kind of ['train', 'loss']) {
        ready[kind] = { batch: plans[kind].batch, program: await Program.ready(plans[kind], this.memory, this.pipelines) };
      }
      this._steps.set(length, ready);
      this.check();
    }
    return this._steps.get(length);
  }

  /**
   * Adds a micro-batch's loss, and in training its gradient; does not wait.
   *
   * @returns {{labels: number, tokens: number}}
   */
  async accumulate(kind, rows, key) {
    const longest = Math.max(...rows.map((row) => row.reduce((n, example) => n + example.ids.length, 0)));
    const length = this.site.buckets.find((n) => n >= longest);
    if (!length) throw new Told(`A row of ${longest} tokens is longer than this site's longest (${this.site.buckets.at(-1)}).`);
    const { batch, program } = (await this.steps(length))[kind];
    const { bytes, labels, tokens } = encodeBatch(batch, rows, { key });
    if (labels) {
      this.memory.write(batch.buffer, bytes);
      await program.run();
    }
    return { labels, tokens };
  }

  /** Updates the adapter by the sums, which start again; the promise has the step's figures. */
  async step(row) {
    this.memory.write(this.variant.step_info[0], row, this.variant.step_info[1]);
    await this.update.run();
    const figures = this.readStats();
    this.zeroStats();
    return { figures };
  }

  async readStats() {
    const [number, offset] = this.variant.stats;
    const found = new Float32Array(await this.memory.read(this.memory.made(number), 4 * STATS, offset));
    this.check();
    return found;
  }

  zeroStats() {
    this.memory.clear(this.variant.stats[0]);
  }

  /** The mean loss over all labels of some examples, the longest first. */
  async evaluate(examples) {
    const size = this.site.training.batch_size;
    const order = examples.map((_, i) => i).sort((a, b) => examples[b].ids.length - examples[a].ids.length || a - b);
    this.zeroStats();
    for (let at = 0; at < order.length; at += size) {
      await this.accumulate('loss', order.slice(at, at + size).map((i) => [examples[i]]));
    }
    const [loss, count] = await this.readStats();
    this.zeroStats();
    return { loss: loss / count, labels: count };
  }

  // -- the adapter's vectors -----------------------------------------------------------------

  /** A vector of the adapter: parameters, gradient or a moment. */
  async readVector(name) {
    const flat = new Float32Array(this.variant.adapter.length);
    let at = 0;
    for (const [number, count] of this.variant.adapter[name]) {
      flat.set(new Float32Array(await this.memory.read(this.memory.made(number), 4 * count)), at);
      at += count;
    }
    this.check();
    return flat;
  }

  writeVector(name, flat) {
    let at = 0;
    for (const [number, count] of this.variant.adapter[name]) {
      this.memory.write(number, flat.subarray(at, at + count));
      at += count;
    }
  }

  close() {
    this.device.destroy();
  }
}
