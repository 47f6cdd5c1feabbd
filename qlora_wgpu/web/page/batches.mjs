/** Which rows make which micro-batch, and its bytes: all as Python's, to the bit. */

import { crc32 } from './crc32.mjs';

const IGNORED = -100;
const SMALLEST = 32;

/** The padded length of a batch, as data/batches.py. */
export function bucketLength(longest, buckets) {
  return buckets.find((n) => n >= longest);
}

/** Lengths that rows are padded to, up to a longest one. */
export function bucketsUpTo(longest) {
  const found = new Set();
  for (let bucket = SMALLEST; ; bucket *= 2) {
    for (const length of [bucket, bucket + bucket / 2]) {
      found.add(Math.min(length, longest));
      if (length >= longest) return [...found];
    }
  }
}

/** NumPy's order of an epoch: raw bits of Philox 4x64-10 under the key (seed, epoch), sorted. */
export function epochOrder(count, seed, epoch) {
  const bits = philox(count, BigInt(seed), BigInt(epoch));
  const order = Array.from({ length: count }, (_, i) => i);
  return order.sort((a, b) => (bits[a] < bits[b] ? -1 : bits[a] > bits[b] ? 1 : a - b));
}

const WORD = (1n << 64n) - 1n;

/** The first raw 64-bit numbers of Philox 4x64-10 (Salmon et al., 2011), as NumPy draws them. */
function philox(count, key0, key1) {
  const drawn = [];
  for (let counter = 1n; drawn.length < count; counter++) {
    let c = [counter, 0n, 0n, 0n];
    let [k0, k1] = [key0, key1];
    for (let round = 0; round < 10; round++) {
      if (round) {
        k0 = (k0 + 0x9e3779b97f4a7c15n) & WORD;
        k1 = (k1 + 0xbb67ae8584caa73bn) & WORD;
      }
      const p0 = 0xd2e7470ee14c6c93n * c[0];
      const p1 = 0xca5a826395121157n * c[2];
      c = [(p1 >> 64n) ^ c[1] ^ k0, p1 & WORD, (p0 >> 64n) ^ c[3] ^ k1, p0 & WORD];
    }
    drawn.push(...c);
  }
  return drawn;
}

/** The key of a micro-batch's dropout masks: CRC-32 of (seed, step, block) as 64-bit words. */
export function dropoutKey(seed, step, block) {
  const words = new BigUint64Array([BigInt(seed), BigInt(step), BigInt(block)]);
  return crc32(new Uint8Array(words.buffer));
}

/** Examples in as few rows as best-fit decreasing finds, as data/batches.py. */
export function pack(lengths, limit) {
  const order = lengths.map((_, i) => i).sort((a, b) => lengths[b] - lengths[a] || a - b);
  const rows = [];
  const room = []; // [what is left, row], ascending
  const before = (a, b) => a[0] - b[0] || a[1] - b[1];
  for (const index of order) {
    const at = firstNotBelow(room, [lengths[index], -1], before);
    let [left, row] = [limit, rows.length];
    if (at === room.length) rows.push([]);
    else [[left, row]] = room.splice(at, 1);
    rows[row].push(index);
    const entry = [left - lengths[index], row];
    room.splice(firstNotBelow(room, entry, before), 0, entry);
  }
  return rows.map((row) => row.sort((a, b) => a - b)).sort((a, b) => a[0] - b[0]);
}

function firstNotBelow(sorted, entry, before) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (before(sorted[middle], entry) < 0) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The division of examples into steps, as training/batching.py. */
export class BatchPlan {
  /**
   * @param {number[]} lengths Tokens of each example.
   * @param {object} settings The site's, or what the user changed of them.
   * @param {number} longest Tokens of the longest row that a plan takes.
   */
  constructor(lengths, settings, longest) {
    Object.assign(this, { settings });
    this.rows = settings.packing ? pack(lengths, longest) : lengths.map((_, i) => [i]);
    this.lengths = this.rows.map((row) => row.reduce((n, i) => n + lengths[i], 0));
    const { batch_size: size, accumulation, epochs, max_steps: most } = settings;
    this.stepsPerEpoch = Math.ceil(Math.ceil(this.rows.length / size) / accumulation);
    this.totalSteps = most > 0 ? most : Math.ceil(epochs * this.stepsPerEpoch);
    this._order = [];
    this._epoch = -1;
  }

  /** The rows of each micro-batch of a step, counted from 0, as numbers of examples. */
  blocks(step) {
    const { batch_size: size, accumulation, seed, grouped } = this.settings;
    const epoch = Math.floor(step / this.stepsPerEpoch);
    if (epoch !== this._epoch) {
      this._order = epochOrder(this.rows.length, seed, epoch);
      this._epoch = epoch;
    }
    const first = (step % this.stepsPerEpoch) * accumulation * size;
    const chosen = this._order.slice(first, first + accumulation * size);
    if (grouped) chosen.sort((a, b) => this.lengths[b] - this.lengths[a]); // sorting is stable
    const blocks = [];
    for (let at = 0; at < chosen.length; at += size) {
      blocks.push(chosen.slice(at, at + size).map((i) => this.rows[i]));
    }
    return blocks;
  }
}

/**
 * The bytes of a micro-batch's inputs, as model/batch_encoding.py writes them.
 *
 * @param {object} layout Where its fields begin.
 * @param {{ids: number[], labels: number[]}[][]} rows The examples of each row; missing rows are padding.
 * @param {{key?: number, listed?: number[], past?: number}} more Dropout's key; rows to list in place of those
 *   that have a label; tokens that came before.
 * @returns {{bytes: ArrayBuffer, labels: number, tokens: number}}
 */
export function encodeBatch(layout, rows, { key, listed, past = 0 } = {}) {
  const { batch, seq } = layout;
  const bytes = new ArrayBuffer(layout.bytes);
  const field = (name, Kind) => new Kind(bytes, layout[name], batch * seq);
  const ids = field('input_ids', Uint32Array);
  const targets = field('targets', Int32Array).fill(IGNORED);
  const rowsWithLabel = field('label_rows', Uint32Array);
  const positions = field('positions', Uint32Array);
  const segments = field('segments', Uint32Array);
  let tokens = 0;
  for (let r = 0; r < batch; r++) {
    let first = 0;
    let sample = 0; // where the last sample begins
    for (const example of rows[r] ?? []) {
      sample = first;
      example.ids.forEach((id, t) => {
        const at = r * seq + first + t;
        ids[at] = id;
        segments[at] = first + 1;
        positions[at] = past + t;
        if (t + 1 < example.ids.length) targets[at] = example.labels[t + 1];
      });
      first += example.ids.length;
    }
    tokens += first;
    // Positions of padding go on, as in Hugging Face's models.
    for (let t = first; t < seq; t++) positions[r * seq + t] = past + t - sample;
  }
  let count = 0;
  if (listed) listed.forEach((row) => (rowsWithLabel[count++] = row));
  else targets.forEach((target, i) => target !== IGNORED && (rowsWithLabel[count++] = i));
  const info = new Uint32Array(bytes, layout.info, 4);
  info[0] = count;
  info[3] = past;
  if (key !== undefined) [info[1], info[2]] = [1, key];
  return { bytes, labels: count, tokens };
}
