/** A plan made ready: pipelines, bind groups, and submits that no desktop system will end. */

import { Told } from './device.mjs';
import { nudged } from './memory.mjs';
import { Pace } from './pace.mjs';

const ALIGNMENT = 256; // of parameters
const MEASURED = 2; // runs that are

/** Pipelines, each compiled once. */
export class Pipelines {
  constructor(device, shaders) {
    this.device = device;
    this.shaders = shaders;
    this.made = new Map();
    this.pace = new Pace();
    this.firstPace = new Pace(); // while drivers compile
  }

  /** Begins to compile some, while weights come; one that fails is told to whoever asks for it. */
  begin(numbers) {
    for (const number of numbers) this.get(number).catch(() => {});
  }

  get(number) {
    if (!this.made.has(number)) this.made.set(number, this._compile(this.shaders[number]));
    return this.made.get(number);
  }

  async _compile({ label, code }) {
    const module = this.device.createShaderModule({ label, code });
    try {
      return await this.device.createComputePipelineAsync({ label, layout: 'auto', compute: { module, entryPoint: 'main' } });
    } catch (error) {
      const notes = (await module.getCompilationInfo()).messages.map((m) => `${m.lineNum}: ${m.message}`).join('; ');
      throw new Told(`The GPU driver failed to compile ${label.split('(')[0]}: ${error.message} ${notes}`);
    }
  }
}

export class Program {
  /**
   * Compiles, allocates and binds.
   *
   * @param {{slots: number[], launches: any[]}} plan As web/variant.py writes it.
   * @param {import('./memory.mjs').Memory} memory
   * @param {Pipelines} pipelines
   */
  static async ready(plan, memory, pipelines) {
    const self = new Program();
    self.device = memory.device;
    const slots = memory.take(plan.slots);
    const numbers = new Set(plan.launches.map((launch) => launch[0]));
    const compiled = new Map();
    await Promise.all([...numbers].map(async (n) => compiled.set(n, await pipelines.get(n))));
    const layouts = new Map([...compiled].map(([n, pipeline]) => [n, pipeline.getBindGroupLayout(0)]));
    const uniforms = await memory.uniforms(parametersOf(plan));
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
      return { shader, pipeline: compiled.get(shader), group, workgroups, seconds: 1e-6 * microseconds };
    });
    self.slots = slots;
    self.submits = null;
    self.runs = 0;
    self.pipelines = pipelines;
    self.pace = pipelines.pace;
    return self;
  }

  /** Where a window of the plan lies. */
  window([where, offset, size], memory) {
    return [where < 0 ? this.slots[-1 - where] : memory.made(where), size, offset];
  }

  /**
   * Submits all launches, in pieces. The first runs wait for each piece and learn how long launches take; in the very
   * first, drivers compile.
   */
  async run() {
    if (this.runs === MEASURED) this.submits = this.pace.cut(this.launches);
    if (this.runs++ < MEASURED) await this._measured(this.runs === 1);
    else for (const [begin, end] of this.submits) this._submit(begin, end);
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

  /** Runs everything, a submit after the other, and notes what they took. */
  async _measured(compiles) {
    const { launches } = this;
    const pace = compiles ? this.pipelines.firstPace : this.pace;
    await done(this.device);
    for (let begin = 0, end; begin < launches.length; begin = end) {
      end = pace.end(launches, begin);
      const start = performance.now();
      this._submit(begin, end);
      await done(this.device);
      pace.learn(launches.slice(begin, end), (performance.now() - start) / 1000);
    }
  }
}

/** The parameters of a plan's launches, each at a place that a binding may begin at. */
function parametersOf(plan) {
  const given = plan.launches.map((launch) => launch[3]).filter((parameters) => parameters.length);
  const words = new Uint32Array(Math.max(given.length, 1) * (ALIGNMENT / 4));
  given.forEach((parameters, i) => words.set(parameters, i * (ALIGNMENT / 4)));
  return words;
}

const done = (device) => nudged(device, device.queue.onSubmittedWorkDone());
