/** A plan made ready: pipelines, bind groups, and submits that no desktop system will end. */

import { Told } from './device.mjs';
import { nudged } from './memory.mjs';

const ALIGNMENT = 256; // of parameters
const LIMIT = 0.1; // seconds of work that the driver gets at once
const MOST = 200; // launches of a submit, so that the device begins while they are encoded

/** Pipelines, each compiled once. */
export class Pipelines {
  constructor(device, shaders) {
    this.device = device;
    this.shaders = shaders;
    this.made = new Map();
  }

  get(number) {
    if (!this.made.has(number)) this.made.set(number, this._compile(this.shaders[number]));
    return this.made.get(number);
  }

  async _compile({ label, code }) {
    const source = /\b(subgroup|quad)[A-Z]\w*\s*[(<]/.test(code) ? `enable subgroups; ${code}` : code;
    const module = this.device.createShaderModule({ label, code: source });
    try {
      return await this.device.createComputePipelineAsync({ label, layout: 'auto', compute: { module, entryPoint: 'main' } });
    } catch (error) {
      const notes = (await module.getCompilationInfo()).messages.map((m) => `${m.lineNum}: ${m.message}`).join('; ');
      throw new Told(`The GPU's driver does not compile ${label.split('(')[0]}: ${error.message} ${notes}`);
    }
  }
}

export class Program {
  /**
   * Compiles, allocates and binds.
   *
   * @param {{slots: number[], launches: any[]}} plan As web/plan_json.py writes it.
   * @param {import('./memory.mjs').Memory} memory
   * @param {Pipelines} pipelines
   */
  static async ready(plan, memory, pipelines) {
    const self = new Program();
    self.device = memory.device;
    const slots = await memory.take(plan.slots);
    const numbers = new Set(plan.launches.map((launch) => launch[0]));
    const compiled = new Map();
    await Promise.all([...numbers].map(async (n) => compiled.set(n, await pipelines.get(n))));
    const layouts = new Map([...compiled].map(([n, pipeline]) => [n, pipeline.getBindGroupLayout(0)]));
    const uniforms = self._uniforms(plan);
    for (const launch of plan.launches) {
      for (const [, where] of launch[2]) if (where >= 0) await memory.buffer(where);
    }
    let at = 0;
    self.launches = plan.launches.map(([shader, workgroups, windows, parameters, microseconds]) => {
      const entries = windows.map(([binding, where, offset, size]) => ({
        binding, resource: { buffer: where < 0 ? slots[-1 - where] : memory.made(where), offset, size },
      }));
      if (parameters.length) {
        entries.push({ binding: 0, resource: { buffer: uniforms, offset: at, size: 4 * parameters.length } });
        at += ALIGNMENT;
      }
      const group = self.device.createBindGroup({ layout: layouts.get(shader), entries });
      return { pipeline: compiled.get(shader), group, workgroups, seconds: 1e-6 * microseconds };
    });
    self.slots = slots;
    self.submits = null;
    return self;
  }

  _uniforms(plan) {
    const count = plan.launches.filter((launch) => launch[3].length).length;
    const words = new Uint32Array(Math.max(count, 1) * (ALIGNMENT / 4));
    let at = 0;
    for (const [, , , parameters] of plan.launches) {
      if (!parameters.length) continue;
      words.set(parameters, at);
      at += ALIGNMENT / 4;
    }
    const buffer = this.device.createBuffer({ label: 'parameters', size: words.byteLength, usage: GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST });
    this.device.queue.writeBuffer(buffer, 0, words);
    return buffer;
  }

  /** Where a window of the plan lies. */
  window([where, offset, size], memory) {
    return [where < 0 ? this.slots[-1 - where] : memory.made(where), size, offset];
  }

  /** Submits all launches, in pieces; waits in the first run alone, which tells how long they take. */
  async run() {
    if (this.submits === null) {
      this.submits = cut(await this._measured(), LIMIT);
      return;
    }
    for (const [begin, end] of this.submits) this._submit(begin, end);
  }

  _submit(begin, end) {
    const encoder = this.device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    let current = null;
    for (let i = begin; i < end; i++) {
      const { pipeline, group, workgroups } = this.launches[i];
      if (pipeline !== current) pass.setPipeline((current = pipeline));
      pass.setBindGroup(0, group);
      pass.dispatchWorkgroups(...workgroups);
    }
    pass.end();
    this.device.queue.submit([encoder.finish()]);
  }

  /** Runs everything, a guessed submit after the other, and returns what each launch took. */
  async _measured() {
    const took = this.launches.map((launch) => launch.seconds);
    await done(this.device);
    for (const [begin, end] of cut(took, LIMIT)) {
      const start = performance.now();
      this._submit(begin, end);
      await done(this.device);
      const seconds = (performance.now() - start) / 1000;
      const guessed = took.slice(begin, end).reduce((a, b) => a + b, 0);
      for (let i = begin; i < end; i++) took[i] *= seconds / guessed;
    }
    return took;
  }
}

/** Neighbours that fill a submit: [first, end] of each. */
export function cut(seconds, limit) {
  const pieces = [];
  let begin = 0;
  let total = 0;
  seconds.forEach((took, i) => {
    if (i > begin && (total + took > limit || i - begin === MOST)) {
      pieces.push([begin, i]);
      [begin, total] = [i, 0];
    }
    total += took;
  });
  if (begin < seconds.length) pieces.push([begin, seconds.length]);
  return pieces;
}

const done = (device) => nudged(device, device.queue.onSubmittedWorkDone());
