/** Figures as the page shows them. */

const MOST_LEFT_OUT = 5; // kinds, in a warning

export const OF_EARLIER_SITE = 'What is kept from before was trained by an earlier version of this site, and cannot be used by this one: new training takes its place.';

export const number = (value) => value.toLocaleString('en');

export const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? '' : 's'}`;

export const bytes = (count) => (count >= 2 ** 30 ? `${(count / 2 ** 30).toFixed(1)} GiB` : `${Math.ceil(count / 2 ** 20)} MiB`);

export function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** What training takes of the GPU, by the lengths of rows, if the longest row has so many tokens. */
export function ofMemory(memory, longest = Infinity) {
  const lengths = Object.keys(memory).map(Number);
  const taken = lengths.find((n) => n >= longest) ?? Math.max(...lengths);
  return `Training takes ${bytes(memory[taken])} of the GPU's memory (rows of ${taken} tokens).`;
}

/** What was found in a file. */
export function ofData(name, { rows, held, tokens, learnt, counts, unknown, ends, dropped, unread, bad, spared, document }) {
  const left = [
    counts.truncated && `${number(counts.truncated)} cut to fit`, counts.dropped && `${number(counts.dropped)} too long and left out`,
    counts.without_labels && `${number(counts.without_labels)} with nothing to learn left out`, counts.empty && `${number(counts.empty)} empty`,
  ].filter(Boolean);
  const what = document ? `one text in ${counted(rows, 'piece')}` : counted(rows, 'row');
  return `${name}: ${what} to learn from (${counted(tokens, 'token')}, ${number(learnt)} of them learnt)` +
    `${held ? `, ${number(held)} held out to measure` : ''}${left.length ? `; ${left.join(', ')}` : ''}.${ofEnds(ends)}${ofBad(bad, counts)}${ofSpared(spared, counts)}${ofDropped(dropped)}${ofUnread(unread)}${ofUnknown(unknown, counts)}`;
}

function ofEnds({ known, learnt }) {
  if (!known) return ' The tokenizer has no end-of-sequence token, so none is learnt.';
  return learnt ? '' : ' No end-of-turn token is learnt anywhere, so the model will not learn when to stop: ' +
    'the site may be written with another chat template than the one its tokenizer was made for (data.chat_template).';
}

function ofBad(bad, counts) {
  if (!bad) return '';
  const [are, them] = bad === 1 ? ['is', 'it'] : ['are', 'them'];
  return ` ${number(bad)} of ${counted(counts.rows, 'row')} ${are} labelled false and learnt like the others: ` +
    `leave ${them} out, since the page learns no answers that are bad.`;
}

function ofSpared(spared, counts) {
  if (!spared) return '';
  return ` ${number(spared)} of ${counted(counts.rows, 'row')} ${spared === 1 ? 'has' : 'have'} no turn to learn without weight 0 or train false.`;
}

/** What the chat template leaves out. */
function ofDropped(dropped) {
  return dropped.slice(0, MOST_LEFT_OUT).map(([what, count]) => ` The chat template leaves ${what} out of ${counted(count, 'row')}.`).join('');
}

function ofUnread(unread) {
  return unread.map(([column, count]) => ` The column ${column} of ${counted(count, 'row')} is not read: only text is.`).join('');
}

function ofUnknown({ tokens, rows, text }, counts) {
  if (!tokens) return '';
  return ` ${counted(tokens, 'token')} in ${number(rows)} of ${number(counts.rows)} rows ${tokens === 1 ? 'is' : 'are'} ${text}: ` +
    'the model does not know what stands there, such as another alphabet.';
}

/** What the model has written; an ellipsis where it would have gone on. */
export function ofAnswer({ text, cut }) {
  return text.trim() ? `${text.trim()}${cut ? ' …' : ''}` : '(it says nothing)';
}

/** What is to be done, or known, before training. */
export function hintOf({ site, busy, loaded, data, resumes }) {
  if (!site || busy) return '';
  if (!loaded) return 'Load the model first.';
  if (!data) return 'Drop your data first.';
  return resumes ? 'Going on keeps the settings that training began with; training anew takes those above.' : '';
}

/** How training ended. */
export function ofEnd({ ended, step, total, before, after }) {
  const measured = before === null ? '' : ` Loss on the rows held out: ${before.toFixed(4)} before, ${after.toFixed(4)} now.`;
  return `${ended ? `Done, ${counted(total, 'step')}.` : `Stopped after step ${number(step)} of ${number(total)}; it is kept.`}${measured}`;
}

/** That training is too short for its warm-up. */
export function ofWarmup(total, last, fixed) {
  const why = last === 0 ? 'Nothing is learnt: warm-up begins with a learning rate of 0, and there is no second step.'
    : `The learning rate is not reached: warm-up takes all ${counted(total, 'step')}, and the last has ${last.toPrecision(2)}.`;
  return `${why} ${fixed ? 'The site has to be written with more steps, or a shorter warm-up.' : 'Take more passes over the data, or more rows.'}`;
}

/** How far training is that was taken up. */
export function ofProgress({ step, total }) {
  return step === total ? `Kept: all of ${counted(total, 'step')}.` : `Kept: step ${number(step)} of ${number(total)}.`;
}

/** That what is kept cannot be trained further, since the page has changed. */
export const ofOtherPage = (data) => `The training on ${data} that is kept began with an earlier version of this page, so it does not go on: ` +
  'what it has learnt can be talked with and saved, and new training takes its place.';

/** What is kept from an earlier visit. */
export function ofKept({ data, rank, step, total }) {
  return step === total ? `An adapter of rank ${rank}, trained on ${data}, is kept from before: load the model to talk with it and to save it.`
    : `Training on ${data} (rank ${rank}) is kept from before, at step ${number(step)} of ${number(total)}: load the model to go on.`;
}
