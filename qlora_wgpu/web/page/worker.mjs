/** All that computes, away from the page: requests come as {id, do, ...}, answers and news go back. */

import { BatchPlan } from './batches.mjs';
import { ChatTemplate } from './chat.mjs';
import { courseOf } from './course.mjs';
import { NoGpu, Told, cutFor, openDevice } from './device.mjs';
import { sha256 } from './digest.mjs';
import { RowEncoder } from './examples.mjs';
import { rowsOf, textOf } from './files.mjs';
import { Model } from './model.mjs';
import { firstPrompt, kindOf, Prompts } from './prompts.mjs';
import { adapterFile } from './safetensors.mjs';
import { learningRate, warmupSteps } from './schedule.mjs';
import { SiteFiles } from './site.mjs';
import { Snapshots } from './snapshots.mjs';
import { Tokenizer } from './tokens.mjs';
import { Training } from './training.mjs';
import { ofWarmup } from './words.mjs';
import { Writer } from './writer.mjs';
import { zipped } from './zip.mjs';

const HELD_OUT = 10; // every so manieth row
const MOST_HELD_OUT = 64;
const SNAPSHOT_SECONDS = 30;
const SHOWN_TOKENS = 400; // of a sample
const RETRIES = 3; // of a device that is lost again and again, at the same place
const [WAITS, WAIT_SECONDS] = [10, 2]; // until a lost GPU is there again

const state = { files: null, site: null, rank: 0, model: null, tokenizer: null, template: null, prompts: null, trained: null, data: null, training: null, writer: null, settings: null, last: null };
const news = (value) => postMessage({ news: value });

const requests = {
  /** Reads site.json and the tokenizer, and sees whether there is a GPU that will do. */
  async open({ base }) {
    state.files = new SiteFiles((name, cache) => fetch(new URL(name, base), { cache }));
    const site = (state.site = await state.files.open());
    state.settings = { ...site.training };
    await state.files.keep([site.text.tokenizer]);
    const file = JSON.parse(new TextDecoder().decode(await state.files.bytes(site.text.tokenizer)));
    state.tokenizer = new Tokenizer(file, site.text);
    state.template = site.text.template === null ? null : new ChatTemplate(site.text.template, site.text.special_tokens, site.text.tool_template);
    state.prompts = new Prompts(await state.files.json(site.text.prompts), state.tokenizer, state.template, site.text.alpaca);
    const { device, vendor } = await openDevice(navigator.gpu, site.needs, navigator.userAgent);
    device.destroy();
    const [name, family] = await storageNames(site, new URL(base).pathname);
    state.snapshots = new Snapshots(name, family, navigator.storage, navigator.locks);
    const kept = await state.snapshots.last();
    const earlier = (await state.snapshots.earlier()).length > 0;
    return { earlier, site: { model: site.model, variants: cutFor(site.variants, vendor), buckets: site.buckets, training: site.training, rows: site.text.rows, chats: state.template !== null, sample: site.sample ?? null, bytes: siteBytes(site) }, kept: kept && kept.about };
  },

  /** Opens the device and puts the weights onto it, and the adapter that was kept if it is of this rank. */
  async load({ rank }) {
    state.rank = rank;
    await loadModel();
    const kept = await state.snapshots.last();
    const restored = kept?.about.rank === rank && kept.about.floats === state.model.variant.adapter.length;
    if (restored) restore(kept);
    return { adapter: adapterInfo(), restored, kept: kept && kept.about };
  },

  /** Rows of a file as examples, some held out; a sample with what is trained on. */
  async data({ name, content }) {
    const text = typeof content === 'string' ? content : await textOf(name, content);
    const rows = rowsOf(name, text);
    const encoder = new RowEncoder(state.tokenizer, state.template, state.site.text.rows, state.prompts.kinds.chat.turn_end);
    const { examples, counts, format, unknown, ends, dropped, unread, bad, spared } = encoder.examples(rows, (done) => news({ kind: 'reading', share: done / rows.length }));
    const held = examples.length < 4 ? [] : examples.filter((_, i) => i % HELD_OUT === HELD_OUT - 1).slice(0, MOST_HELD_OUT);
    const kept = new Set(held);
    const train = examples.filter((e) => !kept.has(e));
    const found = {
      counts, format, ends, dropped, unread, bad, spared, document: Boolean(rows[0].document), held: held.length, unknown: { ...unknown, text: state.tokenizer.specialTokens.unk_token }, rows: train.length,
      tokens: train.reduce((n, e) => n + e.ids.length, 0),
      trained: train.reduce((n, e) => n + e.labels.slice(1).filter((label) => label !== -100).length, 0),
      longest: longest(train, held),
      sample: shownExample(train[0]),
      prompt: firstPrompt(rows, format, encoder, (text) => hasRoom(kindOf(format), text)),
    };
    state.data = { name, text, format, examples: train, held }; // until here what was taken earlier counts
    return found;
  },

  /** Whether what was kept was trained on the rows that this page makes of its data. */
  isSame() {
    const { course, settings } = state.last.about;
    return course === courseOf(new Training(state.model, state.data.examples, settings), state.data.held);
  },

  /** How many steps training will take, which is refused if they are too many. */
  async total({ settings }) {
    await alive();
    return new Training(state.model, state.data.examples, { ...state.settings, ...settings }).total;
  },

  /** Trains until it is done or stopped. */
  async train({ settings, resume, stopped }) {
    state.stopped = stopped;
    Object.assign(state.settings, settings);
    if (!resume) await requests.reset();
    await alive();
    state.trained = kindOf(state.data.format);
    return train(resume ? state.last : null);
  },

  /** Takes the adapter back to where training begins. */
  async reset() {
    await alive();
    state.model.writeVector('parameters', state.model.initial);
    state.trained = null;
  },

  stop() {
    state.stopped = true;
    state.training?.stop();
  },

  /** Writes an answer; its text comes as news, and in the end whether it would have gone on. */
  async write({ messages, most, temperature }) {
    const ids = state.prompts.ids(promptKind(), messages);
    await alive();
    const text = await written(ids, { most, temperature }, (part) => news({ kind: 'text', text: part }));
    return { text, cut: state.writer.cut };
  },

  /** Removes what this browser keeps of the page; what is on the GPU stays. */
  forget() {
    return state.snapshots.forget();
  },

  hush() {
    state.hushed = true;
  },

  /** A file of the adapter, as PEFT has it, or all in one, with how prompts are written for it. */
  async adapter({ name }) {
    await alive();
    const { tensors, config } = state.model.variant.adapter;
    const written = {
      'adapter_model.safetensors': async () => adapterFile(await state.model.readVector('parameters'), tensors),
      'adapter_config.json': async () => `${JSON.stringify(config, null, 2)}\n`,
    };
    if (written[name]) return written[name]();
    const tokenizer = new Uint8Array(await state.files.bytes(state.site.text.tokenizer));
    const files = { ...state.prompts.files(promptKind()), [state.site.text.tokenizer]: tokenizer };
    for (const [each, content] of Object.entries(written)) files[each] = await content();
    const inFolder = Object.entries(files).map(([each, content]) => [`adapter/${each}`, content]);
    return zipped(Object.fromEntries(inFolder), new Date());
  },
};

/** The tokens of the longest row, of several examples where they are packed. */
function longest(train, held) {
  const lengths = (examples) => examples.map((e) => e.ids.length);
  const plan = new BatchPlan(lengths(train), state.settings, state.site.buckets.at(-1));
  return [...plan.lengths, ...lengths(held)].reduce((a, b) => Math.max(a, b), 0); // more than a call takes arguments
}

/** Whether there is room for an answer behind a text. */
function hasRoom(kind, text) {
  const { length } = state.prompts.ids(kind, [{ role: 'user', content: text }]);
  return length <= 0.75 * state.site.buckets.at(-1);
}

/** Where a site's snapshots lie: one that was written again starts over; and how all names of this place begin. */
async function storageNames({ model, training, text, files }, place) {
  const digest = async (value) => (await sha256(new TextEncoder().encode(JSON.stringify(value)))).slice(0, 16);
  const family = `${await digest(place)}-`;
  const name = model.name.slice(-100).replaceAll(/[^\w.-]/g, '_'); // file systems end names at 255 bytes
  return [`${family}${name}-${await digest([training, text, files])}`, family]; // how rows are read, too
}

function restore(kept) {
  state.last = kept;
  state.trained = kept.about.kind ?? null;
  state.model.writeVector('parameters', kept.parameters);
}

/** Opens a device again that was lost or has refused something, with the adapter as it was last kept. */
async function alive() {
  if (state.model?.sound) return;
  await reopen();
  if (state.last) restore(state.last);
}

function siteBytes(site) {
  return site.weights.reduce((n, name) => n + site.files[name].bytes, 0);
}

/** A system that has lost its GPU, or sleeps, may take a while to bring it back. */
async function reopen() {
  for (let left = WAITS; ; left--) {
    try {
      return await loadModel();
    } catch (error) {
      if (!(error instanceof NoGpu) || !left) throw error;
    }
    await new Promise((done) => setTimeout(done, 1000 * WAIT_SECONDS));
  }
}

async function loadModel() {
  state.model?.close();
  state.model = null;
  state.model = await Model.open(navigator.gpu, state.files, state.rank, (what, share) => news({ kind: 'loading', share }), navigator.userAgent);
  state.writer = new Writer(state.model);
}

function adapterInfo() {
  const { vendor, architecture, description } = state.model.device.adapterInfo ?? {};
  return [vendor, architecture, description].filter(Boolean).join(', ');
}

async function train(kept) {
  const { examples, held, name } = state.data;
  const before = kept ? kept.about.before : await measured(held);
  let snapshot = kept;
  let [lost, reached] = [0, 0];
  if (!kept) tellOfWarmup();
  const course = courseOf(new Training(state.model, examples, state.settings), held);
  for (;;) {
    const training = (state.training = new Training(state.model, examples, state.settings));
    if (state.stopped) training.stop();
    if (snapshot) training.resume(snapshot);
    else training.begin();
    const begun = { step: training.step, tokens: training.tokens, at: performance.now() };
    const about = { data: name, text: state.data.text, kind: state.trained, rank: state.rank, settings: { ...state.settings }, total: training.total, course, before };
    let keptAt = performance.now();
    try {
      await training.run({
        onStep: (figures) => news({ kind: 'step', ...figures, ...pace(training, begun) }),
        after: async (step) => {
          if (performance.now() - keptAt < 1000 * SNAPSHOT_SECONDS || step === training.total) return;
          snapshot = await training.snapshot();
          await keepSnapshot(snapshot, about);
          keptAt = performance.now();
        },
      });
      const ended = training.step === training.total;
      snapshot = await training.snapshot();
      await keepSnapshot(snapshot, about);
      return { ended, step: training.step, total: training.total, before, after: await measured(held) };
    } catch (error) {
      if (!(await state.model.isLost())) throw error;
      const step = snapshot?.step ?? 0;
      [lost, reached] = [step > reached ? 1 : lost + 1, step];
      if (lost > RETRIES) throw error;
      news({ kind: 'told', text: `${lostSentence()} Training resumes from step ${step}.` });
      await reopen();
    }
  }
}

/** Warns if training is too short for its warm-up: a single step has a rate of 0, and changes nothing. */
function tellOfWarmup() {
  const { total } = new Training(state.model, state.data.examples, state.settings);
  if (total > warmupSteps(state.settings, total)) return;
  news({ kind: 'told', text: ofWarmup(total, learningRate(state.settings, total, total - 1), state.site.training.max_steps > 0) });
}

const lostSentence = () => `The GPU was lost (${state.model.lost.message || state.model.lost.reason}).`;

async function keepSnapshot(snapshot, about) {
  state.last = { ...snapshot, about: { ...about, floats: snapshot.parameters.length } };
  news({ kind: 'kept', step: snapshot.step, total: about.total });
  try {
    await state.snapshots.keep(snapshot, about);
  } catch (error) {
    news({ kind: 'told', text: error.message });
  }
}

async function measured(held) {
  return held.length ? (await state.model.evaluate(held)).loss : null;
}

function pace(training, begun) {
  const seconds = (performance.now() - begun.at) / 1000;
  const steps = training.step - begun.step;
  return { perSecond: (training.tokens - begun.tokens) / seconds, left: steps ? (seconds / steps) * (training.total - training.step) : null };
}

/** Tokens as text, in runs with and without labels. */
function shownExample({ ids, labels }) {
  const parts = [];
  for (let begin = 0; begin < Math.min(ids.length, SHOWN_TOKENS); ) {
    let end = begin;
    const trained = labels[begin] !== -100;
    while (end < Math.min(ids.length, SHOWN_TOKENS) && (labels[end] !== -100) === trained) end++;
    parts.push({ text: state.tokenizer.shownText(ids.slice(begin, end)), trained });
    begin = end;
  }
  return { parts, cut: ids.length > SHOWN_TOKENS };
}

/** The kind of prompts that the adapter was trained on; before it has, that of the data. */
function promptKind() {
  return state.trained ?? (state.data ? kindOf(state.data.format) : state.template ? 'chat' : 'text');
}

async function written(ids, { most = 100, temperature = 0 }, told) {
  state.hushed = false;
  const { stop, text: stopText } = state.prompts.ends(promptKind());
  const made = [];
  let text = '';
  const before = state.tokenizer.decode(ids);
  for await (const token of state.writer.write(ids, { most, stop, temperature, topP: 0.95, stopped: () => state.hushed })) {
    made.push(token);
    text = state.tokenizer.decode([...ids, ...made]).slice(before.length);
    if (stopText && text.includes(stopText)) {
      text = text.slice(0, text.indexOf(stopText));
      break;
    }
    told(text);
  }
  return text;
}

onmessage = async ({ data: { id, do: name, ...given } }) => {
  try {
    postMessage({ id, answer: await requests[name](given) });
  } catch (error) {
    const told = error instanceof Told;
    if (!told) console.error(error);
    let sentence = told ? error.message : `Something went wrong in the page: ${error.message}`;
    if (error.lost || (!told && (await state.model?.isLost()))) {
      sentence = `${error.lost ? error.message : lostSentence()} Try again: it will be opened again.`;
    }
    postMessage({ id, error: sentence });
  }
};
