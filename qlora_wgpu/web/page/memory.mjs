/** Buffers of a model: made when a program first needs them, filled with the site's weights. */

import { Told } from './device.mjs';

const USAGE = () => GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_DST | GPUBufferUsage.COPY_SRC | GPUBufferUsage.UNIFORM;
const LEAST = 16; // bytes of a buffer

/** Bytes that a buffer of this size takes, as gpu/limits.py has it. */
export const bufferBytes = (bytes) => Math.max(Math.ceil(bytes / 4) * 4, LEAST);

export class Memory {
  /**
   * @param {GPUDevice} device
   * @param {[string, string, number][]} buffers Label, kind and bytes of each.
   */
  constructor(device, buffers) {
    this.device = device;
    this.described = buffers;
    this.buffers = new Map();
    this.slots = []; // shared by all programs, which run one at a time; the largest first
    this.bytes = 0;
  }

  /** Allocates; a refusal comes as a sentence. */
  async _make(label, bytes) {
    this.device.pushErrorScope('out-of-memory');
    const buffer = this.device.createBuffer({ label, size: bufferBytes(bytes), usage: USAGE() });
    const error = await this.device.popErrorScope();
    if (error) {
      throw new Told(`Not enough GPU memory for ${label} (${bytes.toLocaleString('en')} bytes, after ` +
        `${this.bytes.toLocaleString('en')}): close other tabs and programs, or train on shorter rows.`);
    }
    this.bytes += bufferBytes(bytes);
    return buffer;
  }

  /** A buffer by its number. */
  async buffer(number) {
    if (!this.buffers.has(number)) {
      const [label, , bytes] = this.described[number];
      this.buffers.set(number, await this._make(label, bytes));
    }
    return this.buffers.get(number);
  }

  /** A buffer that is there already. */
  made(number) {
    return this.buffers.get(number);
  }

  /** Makes the slots that serve all plans. */
  async reserve(sizes) {
    for (const size of sizes) this.slots.push(await this._make('an activation slot', size));
  }

  /** Buffers for a plan's slots: its largest takes the largest, and so on. */
  take(sizes) {
    const taken = [];
    const order = sizes.map((_, i) => i).sort((a, b) => sizes[b] - sizes[a]);
    order.forEach((slot, i) => (taken[slot] = this.slots[i]));
    return taken;
  }

  /** A plan's parameters on the device. */
  async uniforms(words) {
    const buffer = await this._make('parameters', words.byteLength);
    this.device.queue.writeBuffer(buffer, 0, words);
    return buffer;
  }

  /** Writes bytes or numbers from a byte on. */
  write(number, data, offset = 0) {
    this.device.queue.writeBuffer(this.made(number), offset, data);
  }

  /** Zeroes a buffer. */
  clear(number) {
    const encoder = this.device.createCommandEncoder();
    encoder.clearBuffer(this.made(number));
    this.device.queue.submit([encoder.finish()]);
  }

  /** Queues a copy; the promise has the bytes once the device has come so far. */
  async read(buffer, bytes, offset = 0) {
    const size = Math.ceil(bytes / 4) * 4;
    const staging = this.device.createBuffer({ size, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
    const encoder = this.device.createCommandEncoder();
    encoder.copyBufferToBuffer(buffer, offset, staging, 0, size);
    this.device.queue.submit([encoder.finish()]);
    await nudged(this.device, staging.mapAsync(GPUMapMode.READ));
    const copy = staging.getMappedRange().slice(0, bytes);
    staging.destroy();
    return copy;
  }
}

/** Waits for the device. Firefox looks for finished work every 100 ms only (bug 1870699), or when something comes. */
export async function nudged(device, promise) {
  const nudge = setInterval(() => device.queue.submit([]), 4);
  try {
    return await promise;
  } finally {
    clearInterval(nudge);
  }
}
