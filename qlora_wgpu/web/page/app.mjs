/** The page: what people see and press. All computing is the worker's. */

import { Awake } from './awake.mjs';
import { Chart } from './chart.mjs';
import { droppable } from './drop.mjs';
import { ofExample, ofTurn } from './elements.mjs';
import { kindsOf } from './kinds.mjs';
import { Requests } from './requests.mjs';
import { saveFile } from './saving.mjs';
import { sealedWorker } from './sealed.mjs';
import { OF_EARLIER_SITE, bytes, duration, hintOf, number, ofAnswer, ofData, ofEnd, ofKept, ofMemory, ofOtherPage, ofProgress } from './words.mjs';

const $ = (id) => document.getElementById(id);
const ANSWER = 200; // tokens of an answer at most
const SAMPLE = 60; // of a text before and after
const COMPOSING = 229; // the code of an Enter that ends a composed word, of which Safari says nothing else

const page = { site: null, title: document.title, loaded: false, data: null, busy: false, messages: [], kept: null, resumes: false, began: null };
const requests = new Requests(sealedWorker('worker.mjs'), heard);
const awake = new Awake();
const chart = new Chart({ raw: $('curve'), mean: $('mean') }, { now: $('chart-now'), top: $('chart-top'), middle: $('chart-middle'), steps: $('chart-steps') });

function tell(text) {
  $('told').textContent = text;
  $('told').hidden = !text;
}

/** Runs what a button asks for: one thing at a time, an error as a sentence. */
async function doing(work) {
  if (page.busy) return;
  page.busy = true;
  const focused = document.activeElement;
  tell('');
  show();
  try {
    await work();
  } catch (error) {
    tell(error.message);
  } finally {
    page.busy = false;
    show();
    // A button that was switched off meanwhile has lost the keyboard's place; what was pressed for good leads on.
    if (unplaced()) (isGone(focused) ? nextStep() : focused)?.focus();
  }
}

/** Whether the keyboard has no place: Chromium leaves it on a button that is gone until it draws again. */
const unplaced = () => [document.body, null].includes(document.activeElement) || isGone(document.activeElement);

/** Whether what had the keyboard's place can no longer be pressed. */
const isGone = (element) => element?.disabled || (element instanceof HTMLButtonElement && !element.offsetParent);

const nextStep = () => $(page.data ? 'train' : 'file');

/** What can be pressed now, and what is to be done next. */
function show() {
  const free = !page.busy;
  $('load').disabled = !page.site || page.loaded || !free;
  $('rank').disabled = !page.site || page.loaded || !free;
  for (const id of ['train', 'start-over']) $(id).disabled = !page.loaded || !page.data || !free;
  $('train').textContent = page.resumes ? 'Resume' : page.trained ? 'Train again' : 'Train';
  $('start-over').hidden = !page.resumes;
  $('stop').hidden = !page.training;
  $('keeping').hidden = !page.keeps;
  $('forget').disabled = !free;
  $('hush').hidden = !page.written;
  for (const id of ['send', 'message', 'temperature', 'again', 'folder', 'weights', 'config']) $(id).disabled = !page.loaded || !free;
  for (const id of ['file', 'sample']) $(id).disabled = !page.site || !free;
  for (const id of ['epochs', 'rate']) $(id).disabled = !page.site || !free;
  $('hint').textContent = hintOf(page);
  const done = page.trained && !page.resumes;
  const next = !page.loaded ? 'load' : done ? 'folder' : page.data ? 'train' : null;
  for (const id of ['load', 'train', 'folder']) $(id).classList.toggle('main', id === next);
}

function heard(news) {
  if (news.kind === 'loading') showLoading(news.share);
  else if (news.kind === 'reading') $('rows').textContent = `Reading, ${Math.round(100 * news.share)} %`;
  else if (news.kind === 'told') tell(news.text);
  else if (news.kind === 'step') showStep(news);
  else if (news.kind === 'kept') Object.assign(page, { resumes: news.step < news.total, trained: true, keeps: true });
  else if (news.kind === 'text') page.written?.(news.text);
}

function showLoading(share) {
  $('loading').value = share;
  if (!page.loaded) $('gpu').textContent = share < 1 ? 'Loading…' : 'Loaded; compiling…';
}

function showStep({ step, total, loss, rate, perSecond, left }) {
  $('progress').value = step / total;
  const share = Math.floor((100 * step) / total);
  document.title = `${share} % · loss ${loss.toFixed(3)}`;
  // Those who listen are told now and then, not of each step.
  if (Math.floor(share / 10) !== page.told) say(`${share} %, loss ${loss.toFixed(3)}`);
  page.told = Math.floor(share / 10);
  $('figures').textContent = `step ${number(step)} of ${number(total)} · loss ${loss.toFixed(4)} · ` +
    `learning rate ${rate.toPrecision(3)} · ${number(Math.round(perSecond))} tokens/s` + (left ? ` · ${duration(left)} left` : '');
  chart.add(step, total, loss);
}

const say = (text) => ($('said').textContent = text);

// -- 1. the model ----------------------------------------------------------------------------

async function open() {
  if (!isSecureContext) {
    throw new Error('This page was loaded over plain HTTP, for which browsers disable WebGPU: use HTTPS, or serve it on this machine (127.0.0.1).');
  }
  const { site, kept, earlier } = await requests.ask('open', { base: new URL('.', location.href).href });
  Object.assign(page, { site, kept, keeps: Boolean(kept) || earlier });
  const name = site.model.name.split('/').filter(Boolean).pop();
  $('title').textContent = document.title = page.title = `Train ${name} in this tab`;
  $('base').textContent = name;
  $('subtitle').textContent = `${bytes(site.bytes)} of weights are loaded once and stay frozen; only a small adapter is trained.`;
  for (const { rank } of site.variants) $('rank').add(new Option(rank, rank));
  showSettings(site.training);
  $('passes').hidden = site.training.max_steps > 0; // which count in their place
  $('sample').hidden = !site.sample;
  const kinds = kindsOf(site.rows, site.chats);
  $('kinds').textContent = kinds.join('\n\n');
  $('formats').hidden = !kinds.length;
  if (kept) {
    $('rank').value = kept.rank;
    $('rows').textContent = ofKept(kept);
  } else if (earlier) $('rows').textContent = OF_EARLIER_SITE;
  showMemory();
}

function showSettings({ epochs, learning_rate: rate }) {
  $('epochs').value = epochs;
  $('rate').value = rate;
}

function showMemory() {
  const { memory } = page.site.variants.find((each) => each.rank === Number($('rank').value));
  $('memory').textContent = ofMemory(memory, page.data?.longest);
}

async function load() {
  $('loading').hidden = false;
  $('gpu').textContent = 'Loading…';
  try {
    const { adapter, restored, kept } = await requests.ask('load', { rank: Number($('rank').value) });
    Object.assign(page, { loaded: true, kept, keeps: page.keeps || Boolean(kept) }); // another tab may have kept something meanwhile
    $('gpu').textContent = `Loaded onto the GPU${adapter && ` (${adapter})`}.`;
    if (restored) await goOn(page.kept);
    else if (page.kept) $('rows').textContent = `The saved training has rank ${page.kept.rank}: reload the page and select that rank to resume it. New training replaces it.`;
  } finally {
    $('loading').hidden = true;
    if (!page.loaded) $('gpu').textContent = '';
  }
}

/** Restores the training of an earlier visit. */
async function goOn({ data, text, settings, step, total }) {
  $('figures').textContent = ofProgress({ step, total });
  page.trained = true;
  try {
    await take(data, text);
  } catch (error) {
    throw new Error(`${error.message} ${ofOtherPage(data)}`);
  }
  const same = step === total || (await requests.ask('isSame', {}));
  Object.assign(page, { resumes: step < total && same, trained: true, began: settings });
  showSettings(settings);
  if (!same) throw new Error(`This page prepares ${data} differently. ${ofOtherPage(data)}`);
}

/** Deletes the saved training: others may use this machine, too. */
async function forget() {
  await requests.ask('forget', {});
  Object.assign(page, { kept: null, keeps: false });
  if (!page.data) $('rows').textContent = '';
  say('Deleted from this browser.');
}

// -- 2. data ---------------------------------------------------------------------------------

/** Takes rows: a file, or the text of one that was kept. */
async function take(name, content) {
  const before = $('rows').textContent;
  let found;
  $('rows').setAttribute('aria-busy', 'true'); // those who listen hear what was found, not each percent
  try {
    found = await requests.ask('data', { name, content });
  } catch (error) {
    $('rows').textContent = before; // what was taken earlier still counts
    throw error;
  } finally {
    $('rows').setAttribute('aria-busy', 'false');
  }
  Object.assign(page, { data: found, resumes: false, trained: false });
  $('rows').textContent = ofData(name, found);
  $('tokens').replaceChildren(...ofExample(found.sample));
  $('example').hidden = false;
  showMemory();
}

function takeFiles([file, ...others]) {
  if (page.busy) return tell(`The page is busy: drop ${file.name} again when it has finished.`);
  return doing(() => {
    if (others.length) throw new Error(`Expected one file, got ${others.length + 1}: put all rows into one file.`);
    return take(file.name, file);
  });
}

async function takeSample() {
  const { sample } = page.site;
  let response;
  try {
    response = await fetch(encodeURIComponent(sample));
    if (response.ok) return await take(sample, await response.blob());
  } catch (error) {
    throw response ? error : new Error(`${sample} cannot be downloaded (${error.message}): check that the server is running.`);
  }
  throw new Error(`${sample} cannot be downloaded (${response.status}): copy the site again.`);
}

// -- 3. training -----------------------------------------------------------------------------

async function train({ startOver = false } = {}) {
  const resume = page.resumes && !startOver;
  if (resume) showSettings(page.began);
  const settings = { epochs: $('epochs').valueAsNumber, learning_rate: $('rate').valueAsNumber }; // NaN where there is no number
  if (!(settings.epochs > 0)) throw new Error('Epochs must be positive.');
  if (!(settings.learning_rate >= 0 && settings.learning_rate <= 1)) throw new Error('The learning rate must be between 0 and 1.');
  const messages = [{ role: 'user', content: page.data.prompt }];
  const asked = { messages, most: SAMPLE, temperature: 0 };
  $('asked').textContent = page.data.prompt;
  $('after').textContent = '…';
  Object.assign(page, { training: true, stopping: false });
  show();
  if (unplaced()) $('stop').focus();
  for (const id of ['progress', 'chart']) $(id).hidden = false;
  $('figures').textContent = 'Starting: the first step is slow, since kernels are compiled.';
  try {
    if (!resume) await requests.ask('total', { settings }); // which may be refused
    Object.assign(page, { resumes: resume, began: settings });
    awake.on();
    if (!resume) {
      $('compared').hidden = true;
      chart.clear();
      $('progress').value = 0;
      if (page.data.prompt) {
        await requests.ask('reset', {});
        $('before').textContent = ofAnswer(await requests.ask('write', asked));
        $('compared').hidden = false;
      }
    }
    const result = await requests.ask('train', { settings, resume, stopped: page.stopping });
    $('figures').textContent = ofEnd(result);
    say(ofEnd(result));
  } catch (error) {
    $('figures').textContent = page.resumes ? 'Training was interrupted; it can be resumed from the last snapshot.' : '';
    $('compared').hidden = true;
    throw error;
  } finally {
    page.training = false;
    awake.off();
    $('stop').disabled = false;
    $('stop').textContent = 'Stop and save';
    document.title = page.title;
  }
  if (page.data.prompt) $('after').textContent = ofAnswer(await requests.ask('write', asked));
}

function stop() {
  page.stopping = true;
  $('stop').disabled = true;
  $('stop').textContent = 'Stopping…';
  requests.ask('stop', {});
}

// -- 4. talking ------------------------------------------------------------------------------

async function send() {
  const text = $('message').value.trim();
  if (!text) return;
  $('message').value = '';
  page.messages.push({ role: 'user', content: text });
  turn(text, true);
  const answer = turn('…', false);
  page.written = (part) => (answer.textContent = part.trimStart() || '…');
  $('chat').setAttribute('aria-busy', 'true'); // those who listen hear the answer once, when it is whole
  show();
  try {
    const found = await requests.ask('write', {
      messages: page.messages, most: ANSWER, temperature: Number($('temperature').value),
    });
    answer.textContent = ofAnswer(found);
    page.messages.push({ role: 'assistant', content: found.text });
  } catch (error) {
    page.messages.pop();
    answer.previousElementSibling.remove();
    answer.remove();
    $('message').value = text;
    throw error;
  } finally {
    page.written = null;
    $('chat').setAttribute('aria-busy', 'false');
  }
}

function turn(text, own) {
  return $('chat').appendChild(ofTurn(text, own));
}

// -- 5. files --------------------------------------------------------------------------------

const save = async (name) => saveFile(name, await requests.ask('adapter', { name }));

// --------------------------------------------------------------------------------------------

$('load').onclick = () => doing(load);
$('rank').onchange = showMemory;
$('file').onchange = ({ target }) => {
  const files = [...target.files];
  target.value = ''; // the same file, mended, can be chosen again
  if (files.length) takeFiles(files);
};
$('forget').onclick = () => doing(forget);
$('sample').onclick = () => doing(takeSample);
$('train').onclick = () => doing(train);
$('start-over').onclick = () => doing(() => train({ startOver: true }));
$('stop').onclick = stop;
$('hush').onclick = () => requests.ask('hush', {});
$('message').onkeydown = (event) => {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing || event.keyCode === COMPOSING) return;
  event.preventDefault();
  $('ask').requestSubmit();
};
$('ask').onsubmit = (event) => {
  event.preventDefault();
  doing(send);
};
$('again').onclick = () => {
  page.messages = [];
  $('chat').replaceChildren();
};
$('folder').onclick = () => doing(() => save('adapter.zip'));
$('weights').onclick = () => doing(() => save('adapter_model.safetensors'));
$('config').onclick = () => doing(() => save('adapter_config.json'));
droppable($('drop'), (files) => page.site && takeFiles(files));
addEventListener('beforeunload', (event) => page.training && event.preventDefault());

doing(open).finally(() => page.site || $('subtitle').replaceChildren()); // it says that it opens
