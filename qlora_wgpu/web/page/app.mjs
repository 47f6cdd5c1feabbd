/** The page: what people see and press. All computing is the worker's. */

import { Chart } from './chart.mjs';
import { Requests } from './requests.mjs';

const $ = (id) => document.getElementById(id);
const ANSWER = 200; // tokens of an answer at most
const SAMPLE = 60; // of a text before and after
const number = (value) => value.toLocaleString('en');
const mebibytes = (bytes) => (bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(1)} GiB` : `${Math.ceil(bytes / 2 ** 20)} MiB`);

const page = { site: null, loaded: false, data: null, busy: false, messages: [], kept: null };
const requests = new Requests(new Worker('start.mjs', { type: 'module' }), heard);
const chart = new Chart($('curve'), $('chart'), { now: $('chart-now'), top: $('chart-top'), steps: $('chart-steps') });

function tell(text) {
  $('told').textContent = text;
  $('told').hidden = !text;
}

/** Runs what a button asks for: one thing at a time, an error as a sentence. */
async function doing(work) {
  if (page.busy) return;
  page.busy = true;
  tell('');
  show();
  try {
    await work();
  } catch (error) {
    tell(error.message);
  } finally {
    page.busy = false;
    show();
  }
}

/** What can be pressed now. */
function show() {
  const free = !page.busy;
  $('load').disabled = !page.site || page.loaded || !free;
  $('rank').disabled = page.loaded || !free;
  $('train').disabled = !page.loaded || !page.data || !free;
  $('stop').hidden = !page.training;
  for (const id of ['send', 'message', 'again', 'weights', 'config']) $(id).disabled = !page.loaded || !free;
  for (const id of ['file', 'sample', 'epochs', 'rate']) $(id).disabled = !page.site || !free;
  const next = !page.loaded ? 'load' : page.data ? 'train' : null;
  for (const id of ['load', 'train']) $(id).classList.toggle('main', id === next);
}

function heard(news) {
  if (news.kind === 'loading') $('loading').value = news.share;
  else if (news.kind === 'reading') $('rows').textContent = `Reading, ${Math.round(100 * news.share)} %`;
  else if (news.kind === 'told') tell(news.text);
  else if (news.kind === 'step') showStep(news);
  else if (news.kind === 'text') page.written?.(news.text);
}

function showStep({ step, total, loss, rate, perSecond, left }) {
  $('progress').value = step / total;
  document.title = `${Math.floor((100 * step) / total)} % · loss ${loss.toFixed(3)}`;
  $('figures').textContent = `step ${number(step)} of ${number(total)} · loss ${loss.toFixed(4)} · ` +
    `learning rate ${rate.toPrecision(3)} · ${number(Math.round(perSecond))} tokens/s` + (left ? ` · ${duration(left)} left` : '');
  chart.add(step, total, loss);
}

const duration = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`);

// -- 1. the model ----------------------------------------------------------------------------

async function open() {
  const { site, kept } = await requests.ask('open', { base: new URL('.', location.href).href });
  Object.assign(page, { site, kept });
  const name = site.model.name.split('/').filter(Boolean).pop();
  $('title').textContent = `Train ${name} in this tab`;
  $('base').textContent = name;
  $('subtitle').textContent = `${mebibytes(site.bytes)} of weights to load once, 4 bits each where it matters.`;
  for (const { rank } of site.variants) $('rank').add(new Option(rank, rank));
  $('epochs').value = site.training.epochs;
  $('rate').value = site.training.learning_rate;
  $('sample').hidden = !site.sample;
  if (kept) await offerToGoOn(kept);
  showMemory();
}

async function offerToGoOn(kept) {
  $('rank').value = kept.rank;
  const done = kept.step === kept.total;
  tell('');
  $('rows').textContent = `Training on ${kept.data} is kept from before, ${done ? 'done' : `at step ${number(kept.step)} of ${number(kept.total)}`}: ` +
    'load the model, and it goes on.';
}

function showMemory() {
  const variant = page.site.variants.find((each) => each.rank === Number($('rank').value));
  const lengths = Object.keys(variant.memory).map(Number);
  const longest = page.data ? lengths.find((n) => n >= page.data.longest) ?? Math.max(...lengths) : Math.max(...lengths);
  $('memory').textContent = `takes ${mebibytes(variant.memory[longest])} of the GPU's memory for rows of ${longest} tokens`;
}

async function load() {
  $('loading').hidden = false;
  try {
    const { adapter } = await requests.ask('load', { rank: Number($('rank').value) });
    page.loaded = true;
    $('gpu').textContent = `On ${adapter}.`;
  } finally {
    $('loading').hidden = true;
  }
  if (page.kept) await goOn();
}

async function goOn() {
  const { kept } = page;
  page.kept = null;
  await take(kept.data, kept.text);
  $('epochs').value = kept.settings.epochs;
  $('rate').value = kept.settings.learning_rate;
  page.resumes = true;
  $('train').textContent = kept.step === kept.total ? 'Train anew' : 'Go on';
  if (kept.step === kept.total) page.resumes = false;
}

// -- 2. data ---------------------------------------------------------------------------------

async function take(name, text) {
  page.data = null;
  $('example').hidden = true;
  const found = await requests.ask('data', { name, text });
  page.data = found;
  page.resumes = false;
  $('train').textContent = 'Train';
  $('rows').textContent = inWords(name, found);
  const shown = found.sample.parts.map(({ text: part, learnt }) => {
    const element = document.createElement(learnt ? 'mark' : 'span');
    element.textContent = part;
    return element;
  });
  $('tokens').replaceChildren(...shown, found.sample.cut ? ' …' : '');
  $('example').hidden = false;
  showMemory();
}

function inWords(name, { rows, held, tokens, learnt, counts }) {
  const left = [
    counts.truncated && `${number(counts.truncated)} cut to fit`, counts.dropped && `${number(counts.dropped)} too long and left out`,
    counts.without_labels && `${number(counts.without_labels)} with nothing to learn left out`, counts.empty && `${number(counts.empty)} empty`,
  ].filter(Boolean);
  return `${name}: ${number(rows)} rows to learn from (${number(tokens)} tokens, ${number(learnt)} of them learnt)` +
    `${held ? `, ${number(held)} held out to measure` : ''}${left.length ? `; ${left.join(', ')}` : ''}.`;
}

const takeFile = (file) => doing(async () => take(file.name, await file.text()));

// -- 3. training -----------------------------------------------------------------------------

async function train() {
  const epochs = Number($('epochs').value);
  const rate = Number($('rate').value);
  if (!(epochs > 0)) throw new Error('Passes over the data must be more than 0.');
  if (!(rate >= 0 && rate <= 1)) throw new Error('The learning rate must be from 0 to 1.');
  const messages = [{ role: 'user', content: page.data.prompt }];
  const asked = { messages, text: page.data.prompt, most: SAMPLE, temperature: 0 };
  $('asked').textContent = page.data.prompt;
  $('compared').hidden = !page.data.prompt;
  $('after').textContent = '';
  if (!page.resumes && page.data.prompt) $('before').textContent = (await requests.ask('write', asked)).text;
  page.training = true;
  show();
  for (const id of ['progress', 'chart']) $(id).hidden = false;
  if (!page.resumes) chart.clear();
  try {
    const result = await requests.ask('train', { settings: { epochs, learning_rate: rate }, resume: page.resumes });
    $('figures').textContent = ended(result);
    page.resumes = !result.ended;
    $('train').textContent = result.ended ? 'Train anew' : 'Go on';
  } finally {
    page.training = false;
    document.title = 'Train in this tab';
  }
  if (page.data.prompt) $('after').textContent = (await requests.ask('write', asked)).text;
}

function ended({ ended: whole, step, total, before, after }) {
  const measured = before === null ? '' : ` Held-out loss: ${before.toFixed(4)} before, ${after.toFixed(4)} now.`;
  return `${whole ? `Done, ${number(total)} steps.` : `Stopped after step ${number(step)} of ${number(total)}; it is kept.`}${measured}`;
}

// -- 4. talking ------------------------------------------------------------------------------

async function send() {
  const text = $('message').value.trim();
  if (!text) return;
  $('message').value = '';
  page.messages.push({ role: 'user', content: text });
  turn(text, true);
  const answer = turn('…', false);
  page.written = (part) => (answer.textContent = part);
  try {
    const found = await requests.ask('write', {
      messages: page.messages, text, most: ANSWER, temperature: Number($('temperature').value),
    });
    answer.textContent = found.text || '(it says nothing)';
    page.messages.push({ role: 'assistant', content: found.text });
  } catch (error) {
    page.messages.pop();
    answer.remove();
    throw error;
  } finally {
    page.written = null;
  }
}

function turn(text, own) {
  const element = document.createElement('div');
  element.className = own ? 'turn own' : 'turn';
  element.textContent = text;
  $('chat').append(element);
  return element;
}

// -- 5. files --------------------------------------------------------------------------------

async function save(name) {
  const { weights, config } = await requests.ask('adapter', {});
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([name.endsWith('.json') ? config : weights]));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// --------------------------------------------------------------------------------------------

$('load').onclick = () => doing(load);
$('rank').onchange = showMemory;
$('file').onchange = (event) => event.target.files[0] && takeFile(event.target.files[0]);
$('sample').onclick = () => doing(async () => take(page.site.sample, await (await fetch(page.site.sample)).text()));
$('train').onclick = () => doing(train);
$('stop').onclick = () => requests.ask('stop', {});
$('ask').onsubmit = (event) => {
  event.preventDefault();
  doing(send);
};
$('again').onclick = () => {
  page.messages = [];
  $('chat').replaceChildren();
};
$('weights').onclick = () => doing(() => save('adapter_model.safetensors'));
$('config').onclick = () => doing(() => save('adapter_config.json'));
for (const kind of ['dragover', 'dragleave', 'drop']) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    $('drop').classList.toggle('over', kind === 'dragover');
    if (kind === 'drop' && event.dataTransfer.files[0] && page.site) takeFile(event.dataTransfer.files[0]);
  });
}
addEventListener('beforeunload', (event) => page.training && event.preventDefault());

doing(open);
