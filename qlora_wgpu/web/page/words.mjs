/** The page's sentences and numbers. */

const MOST_LEFT_OUT = 5; // kinds, in a warning

export const OF_EARLIER_SITE = 'The saved training is from an earlier version of this site and cannot be used: new training replaces it.';

export const number = (value) => value.toLocaleString('en');

export const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? '' : 's'}`;

export const bytes = (count) => (count >= 2 ** 30 ? `${(count / 2 ** 30).toFixed(1)} GiB` : `${Math.ceil(count / 2 ** 20)} MiB`);

export function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** The GPU memory that training needs, if the longest row has this many tokens. */
export function ofMemory(memory, longest = Infinity) {
  const lengths = Object.keys(memory).map(Number);
  const taken = lengths.find((n) => n >= longest) ?? Math.max(...lengths);
  return `Training needs ${bytes(memory[taken])} of GPU memory (rows of ${taken} tokens).`;
}

/** What was found in a file. */
export function ofData(name, { rows, held, tokens, trained, counts, unknown, ends, dropped, unread, bad, spared, document }) {
  const left = [
    counts.truncated && `${number(counts.truncated)} truncated`, counts.dropped && `${number(counts.dropped)} too long and skipped`,
    counts.without_labels && `${number(counts.without_labels)} without labels skipped`, counts.empty && `${number(counts.empty)} empty`,
  ].filter(Boolean);
  const what = document ? `one document in ${counted(rows, 'piece')}` : counted(rows, 'row');
  return `${name}: ${what} to train on (${counted(tokens, 'token')}, loss on ${number(trained)})` +
    `${held ? `, ${number(held)} held out for evaluation` : ''}${left.length ? `; ${left.join(', ')}` : ''}.${ofEnds(ends)}${ofBad(bad, counts)}${ofSpared(spared, counts)}${ofDropped(dropped)}${ofUnread(unread)}${ofUnknown(unknown, counts)}`;
}

function ofEnds({ known, trained }) {
  if (!known) return ' The tokenizer has no end-of-sequence token, so the model is not trained on one.';
  return trained ? '' : ' The loss is taken on no end-of-turn token, so the model will not learn when to stop: ' +
    'the chat template may not fit the tokenizer (data.chat_template of the site).';
}

function ofBad(bad, counts) {
  if (!bad) return '';
  const [are, them] = bad === 1 ? ['is', 'it'] : ['are', 'them'];
  return ` ${number(bad)} of ${counted(counts.rows, 'row')} ${are} labelled false, but trained on like the others: ` +
    `remove ${them}, since the page does not support undesirable answers.`;
}

function ofSpared(spared, counts) {
  if (!spared) return '';
  return ` ${number(spared)} of ${counted(counts.rows, 'row')} ${spared === 1 ? 'has' : 'have'} only turns with weight 0 or train false.`;
}

/** What the chat template leaves out. */
function ofDropped(dropped) {
  return dropped.slice(0, MOST_LEFT_OUT).map(([what, count]) => ` The chat template leaves ${what} out of ${counted(count, 'row')}.`).join('');
}

function ofUnread(unread) {
  return unread.map(([column, count]) => ` The column ${column} of ${counted(count, 'row')} is ignored: only text is supported.`).join('');
}

function ofUnknown({ tokens, rows, text }, counts) {
  if (!tokens) return '';
  return ` ${counted(tokens, 'token')} in ${number(rows)} of ${number(counts.rows)} rows ${tokens === 1 ? 'is' : 'are'} ${text}: ` +
    'the model cannot represent this text, such as another alphabet.';
}

/** What the model has generated; an ellipsis if it was not finished. */
export function ofAnswer({ text, cut }) {
  return text.trim() ? `${text.trim()}${cut ? ' …' : ''}` : '(empty)';
}

/** A hint before training. */
export function hintOf({ site, busy, loaded, data, resumes }) {
  if (!site || busy) return '';
  if (!loaded) return 'Load the model first.';
  if (!data) return 'Drop your data first.';
  return resumes ? 'Resuming keeps the original settings; starting over uses those above.' : '';
}

/** How training ended. */
export function ofEnd({ ended, step, total, before, after }) {
  const measured = before === null ? '' : ` Held-out loss: ${before.toFixed(4)} before, ${after.toFixed(4)} now.`;
  return `${ended ? `Done, ${counted(total, 'step')}.` : `Stopped after step ${number(step)} of ${number(total)}; it is saved.`}${measured}`;
}

/** That training is too short for its warm-up. */
export function ofWarmup(total, last, fixed) {
  const why = last === 0 ? 'The model does not change: warm-up starts with a learning rate of 0, and there is only one step.'
    : `The learning rate is not reached: warm-up takes all ${counted(total, 'step')}, and ends at ${last.toPrecision(2)}.`;
  return `${why} ${fixed ? 'The site needs more steps, or a shorter warm-up.' : 'Set more epochs, or use more rows.'}`;
}

/** The progress of a saved training. */
export function ofProgress({ step, total }) {
  return step === total ? `Saved: all ${counted(total, 'step')}.` : `Saved: step ${number(step)} of ${number(total)}.`;
}

/** That a saved training cannot be resumed, since the page has changed. */
export const ofOtherPage = (data) => `The saved training on ${data} is from an earlier version of this page and cannot be resumed: ` +
  'you can still chat with its model and save it, and new training replaces it.';

/** What is saved from an earlier visit. */
export function ofKept({ data, rank, step, total }) {
  return step === total ? `An adapter of rank ${rank}, trained on ${data}, is saved here: load the model to chat with it or download it.`
    : `Training on ${data} (rank ${rank}) is saved at step ${number(step)} of ${number(total)}: load the model to resume.`;
}
