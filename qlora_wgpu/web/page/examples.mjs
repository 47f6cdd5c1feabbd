/** Rows as token ids and labels, as data/row_formats.py and data/row_source.py make them. */

import { EmptyRow, fromJson } from './canonical_messages.mjs';
import { CHATS, conversationOf, formatOf, keysOf, USUAL_ROLES } from './conversations.mjs';
import { Told } from './device.mjs';
import { isSome } from './json.mjs';
import { heedsMarks, trainedTurns } from './trained_turns.mjs';
import { LeftOut } from './left_out.mjs';
import { documentIds, MOST_OF_A_ROW } from './long_text.mjs';
import { isBlank, strip } from './strip.mjs';
import { checkSize } from './tokens.mjs';

const IGNORED = -100;
const UNASKED = 'no turn to train on without weight 0 or train: false';
const MOST_ROLES = 8; // in a message
const UNREAD = ['image', 'images', 'video', 'videos', 'audio', 'audios']; // as TRL has them
const MASKS = // what other trainers call a number for each token; as data/columns.py
  /^(assistant_masks?|completion_masks?|label_mask|labels|loss_masks?|loss_weights|response_mask|token_weights|weights)$/;
const TASK = 'Below is an instruction that describes a task';
const REQUEST = 'Write a response that appropriately completes the request.';

export class RowEncoder {
  /**
   * @param {import('./tokens.mjs').Tokenizer} tokenizer
   * @param {import('./chat.mjs').ChatTemplate|null} template
   * @param {{train_on: string, max_length: number, truncation: string, format: string, columns: Record<string, string>, refuses_images?: boolean}} how
   * @param {number|null} turnEnd The token that the template writes behind an assistant's turn.
   */
  constructor(tokenizer, template, how, turnEnd = null) {
    Object.assign(this, { tokenizer, template, how, turnEnd, finders: new WeakMap() });
  }

  /**
   * All examples of some rows, and what became of the others.
   *
   * @param {{where: string, row: object}[]} rows
   * @param {(done: number) => void} progress
   */
  examples(rows, progress = () => {}) {
    if (rows[0]?.document) return this._windows(rows[0], progress);
    const counts = { rows: rows.length, empty: 0, truncated: 0, dropped: 0, without_labels: 0 };
    const examples = [];
    let [format, unreached] = [null, 0]; // rows whose cut leaves out all that the loss is taken on
    const silent = { rows: 0, roles: new Set() }; // in which the assistant says nothing
    const unknown = { tokens: 0, rows: 0 };
    const unread = new Map(); // numbers of rows by columns of which nothing is trained on
    let [bad, spared] = [0, 0]; // rows that say so of themselves, or of all turns that they are not trained on
    const ends = this._ends();
    this.dropped = new Map(); // numbers of conversations of which the template leaves something out, by what it is
    rows.forEach(({ where, row: given }, index) => {
      if (index % 100 === 0) progress(index);
      try {
        if (Object.values(given).every((value) => value === null)) throw new EmptyRow('all values of the row are null');
        refuseMasks(given);
        const row = this.named(given);
        if (this.how.refuses_images) refuseImages(row);
        const own = formatOf(row, this.how.format, this.how.columns);
        format ??= own;
        if (own !== format) {
          throw new Told(`its format is '${own}', but that of the rows before it is '${format}': use a separate file for each format`);
        }
        for (const column of UNREAD.filter((each) => isSome(given[each] ?? null))) unread.set(column, (unread.get(column) ?? 0) + 1);
        const whole = this.encode(row, own);
        this._countUnknown(whole.ids, unknown);
        ends.trained ||= this._learnsEnd(whole.labels, own);
        const cut = this._cut(whole, where);
        if (!cut) counts.dropped++;
        else if (!learns(cut)) {
          counts.without_labels++;
          if (cut !== whole && learns(whole)) unreached++;
          else if (whole.spared) spared++;
          else if (CHATS.includes(own)) countSilent(conversationOf(own, row).messages, silent);
        } else {
          if (cut !== whole) counts.truncated++;
          if (own !== 'text' && isLabelledFalse(row)) bad++;
          examples.push(cut);
        }
      } catch (error) {
        if (error instanceof EmptyRow) counts.empty++;
        else if (error instanceof Told) throw new Told(error.message.startsWith(where) ? error.message : `${where}: ${error.message}`);
        else throw error;
      }
    });
    if (!examples.length) throw new Told(nothing(counts, unreached, spared, silent, this.how));
    const dropped = mostFirst(this.dropped);
    return { examples, counts, format, unknown, ends, dropped, unread: mostFirst(unread), bad, spared };
  }

  /** Whether there is a token that ends what is trained on, and whether it is trained on; none that is known is not missed. */
  _ends() {
    return { known: this.tokenizer.eosId !== null, trained: !this.tokenizer.eosIds.size };
  }

  _learnsEnd(labels, format) {
    const own = CHATS.includes(format) ? this.turnEnd : null;
    return labels.some((label) => this.tokenizer.eosIds.has(label) || (own !== null && label === own));
  }

  /** Counts tokens that stand for what the tokenizer does not know. */
  _countUnknown(ids, unknown) {
    const count = ids.filter((id) => id === this.tokenizer.unknownId).length;
    unknown.tokens += count;
    unknown.rows += count > 0;
  }

  /** A document, cut into pieces of the longest length; the last one holds the rest, a token by itself nothing to learn. */
  _windows({ where, row: { text } }, progress) {
    const { max_length: limit } = this.how;
    if (isBlank(text)) throw new Told(`${where} has no text.`);
    const examples = [];
    let ids = [];
    for (const { ids: more, done } of documentIds(this.tokenizer, text)) {
      ids = ids.concat(more);
      const whole = ids.length - (ids.length % limit);
      for (let at = 0; at < whole; at += limit) examples.push(ids.slice(at, at + limit));
      ids = ids.slice(whole);
      progress(done / text.length); // of one row
    }
    if (ids.length > 1) examples.push(ids);
    if (!examples.length) throw new Told(`${where} has fewer than two tokens: nothing to train on.`);
    const counts = { rows: examples.length, empty: 0, truncated: 0, dropped: 0, without_labels: 0 };
    const unknown = { tokens: 0, rows: 0 };
    for (const piece of examples) this._countUnknown(piece, unknown);
    return { examples: examples.map((piece) => ({ ids: piece, labels: [...piece] })), counts, format: 'text', unknown, ends: { ...this._ends(), trained: true }, dropped: [], unread: [], bad: 0, spared: 0 };
  }

  /** A row whose columns have the names that formats know. */
  named(row) {
    const renamed = { ...row };
    for (const [key, column] of Object.entries(this.how.columns)) {
      if (!(column in row)) throw new Told(`the column '${column}', which data.columns maps to '${key}', is missing`);
      renamed[key] = row[column];
    }
    return renamed;
  }

  _cut(encoded, where) {
    const { max_length: limit, truncation } = this.how;
    if (encoded.ids.length <= limit) return encoded;
    if (truncation === 'error') throw new Told(`${where}: it has ${encoded.ids.length} tokens, more than ${limit}`);
    if (truncation === 'drop') return null;
    const kept = truncation === 'keep_start' ? [0, limit] : [-limit];
    return { ids: encoded.ids.slice(...kept), labels: encoded.labels.slice(...kept) };
  }

  /** Ids and labels of a row. */
  encode(row, format) {
    if (keysOf(format).every((key) => row[key] === null)) throw new EmptyRow('all keys of its format are null');
    if (CHATS.includes(format)) return this._chat(format, row);
    if (format === 'prompt/completion') return this._answer(textOf(row, 'prompt'), textOf(row, 'completion'));
    if (format === 'instruction/output') return this._instruction(row);
    return this._text(row);
  }

  _chat(key, row) {
    const { train_on: wanted } = this.how;
    const conversation = conversationOf(key, row, this.template !== null && heedsMarks(this.template, wanted));
    if (!this.template) throw new Told('the rows are conversations, but this site has no chat template: build it with data.chat_template');
    const template = this.template.suited(conversation);
    const { text, spans, spared, turns } = trainedTurns(template, conversation, wanted, this.tokenizer.specialTokens.eos_token);
    if (!this.finders.has(template)) this.finders.set(template, new LeftOut(template));
    const leftOut = this.finders.get(template).of(conversation, text, wanted === 'all' ? new Set() : turns);
    const encoded = this._masked(text, spans, false);
    for (const what of leftOut) this.dropped.set(what, (this.dropped.get(what) ?? 0) + 1);
    return { ...encoded, spared };
  }

  _instruction(row) {
    const extra = (row.input ?? null) === null ? '' : textOf(row, 'input');
    const system = (row.system ?? null) === null ? '' : textOf(row, 'system');
    const instruction = textOf(row, 'instruction');
    const prompt = alpacaPrompt(instruction, extra, system, historyOf(row));
    const output = textOf(row, 'output');
    requireText(instruction + extra + output);
    return this._answer(prompt, output);
  }

  _text(row) {
    if (!['auto', 'all'].includes(this.how.train_on)) throw new Told("a 'text' has no turns: build the site with data.train_on set to all");
    const text = textOf(row, 'text');
    requireText(text);
    checkSize(text, MOST_OF_A_ROW);
    const ids = [...documentIds(this.tokenizer, text, !this.tokenizer.begins(text))].flatMap((piece) => piece.ids);
    return this._ended(ids, [...ids]);
  }

  _answer(prompt, answer) {
    const text = prompt + answer;
    requireText(text);
    const { ids, labels } = this._masked(text, [[prompt.length, text.length]], !this.tokenizer.begins(text));
    const ended = this._ended(ids, labels);
    return this.how.train_on === 'all' ? { ids: ended.ids, labels: [...ended.ids] } : ended;
  }

  /** The row with the end-of-sequence token behind it, which is trained on. */
  _ended(ids, labels) {
    const eos = this.tokenizer.eosId;
    if (eos !== null) {
      if (ids.at(-1) !== eos) {
        ids.push(eos);
        labels.push(eos);
      }
      labels[labels.length - 1] = eos;
    }
    return { ids, labels };
  }

  _masked(text, spans, special) {
    const { ids, trained } = this.tokenizer.encodeMasked(text, spans, special);
    return { ids, labels: ids.map((id, i) => (trained[i] ? id : IGNORED)) };
  }
}

/** The prompt of an instruction, in Stanford Alpaca's wording. */
export function alpacaPrompt(instruction, extra = '', system = '', history = []) {
  const task = !isBlank(extra) ? `${TASK}, paired with an input that provides further context.` : `${TASK}.`;
  const parts = [!isBlank(system) ? system : `${task} ${REQUEST}`];
  for (const [earlier, answer] of history) parts.push(`### Instruction:\n${earlier}`, `### Response:\n${answer}`);
  parts.push(`### Instruction:\n${instruction}`);
  if (!isBlank(extra)) parts.push(`### Input:\n${extra}`);
  return [...parts, '### Response:\n'].join('\n\n');
}

function textOf(row, key) {
  if (typeof row[key] !== 'string') throw new Told(`'${key}' must be text`);
  return row[key];
}

/** Refuses a column that says which tokens of a row are trained on, in the words of other trainers. */
export function refuseMasks(row) {
  for (const key of Object.keys(row).filter((each) => MASKS.test(each)).sort()) {
    const numbers = numbersOf(row[key]);
    if (!numbers.length || (key === 'labels' && !numbers.some((each) => Number(each) === IGNORED))) continue;
    throw new Told(`the column '${key}' is a loss mask, which is not supported for rows of text: put what to train on into 'completion', set train: false in the other turns, or remove the column`);
  }
}

/** Refuses a row with images: the page trains a model that reads them on text alone. */
export function refuseImages(row) {
  const column = ['image', 'images'].find((each) => isSome(row[each] ?? null));
  if (column !== undefined) throw new Told(`the row has images ('${column}'), but the page only trains on text: remove the row, or train with qlora-wgpu`);
}

/** A list of numbers, also where a table keeps it as text; empty for all else. */
function numbersOf(value) {
  try {
    const list = typeof value === 'string' && value.startsWith('[') ? JSON.parse(value) : value;
    return Array.isArray(list) && list.every((each) => ['number', 'bigint', 'boolean'].includes(typeof each)) ? list : [];
  } catch {
    return [];
  }
}

/** Instructions and answers before a row's own. */
function historyOf(row) {
  const given = fromJson(row.history ?? null);
  const turns = isSome(given) ? given : [];
  if (!Array.isArray(turns) || !turns.every((turn) => Array.isArray(turn) && turn.length === 2)) {
    throw new Told("'history' must be a list of pairs of an instruction and an answer");
  }
  if (!turns.flat().every((text) => typeof text === 'string')) throw new Told("'history' must contain only text");
  return turns;
}

function requireText(text) {
  if (isBlank(text)) throw new EmptyRow('the row has no text');
}

/** Whether a row says of itself that it is bad; a 0 may be the label of anything. */
function isLabelledFalse({ label }) {
  return label === false || (typeof label === 'string' && strip(label).toLowerCase() === 'false');
}

const mostFirst = (numbers) => [...numbers].sort(([, a], [, b]) => b - a);

const learns = ({ labels }) => labels.slice(1).some((label) => label !== IGNORED);

function countSilent(messages, silent) {
  const roles = messages.map(({ role }) => role);
  if (roles.includes('assistant')) return;
  silent.rows++;
  for (const role of roles) silent.roles.add(role);
}

function nothing({ rows, empty, dropped, without_labels: unlabeled }, unreached, spared, silent, { max_length: limit }) {
  const of = (count, one, several) => count > 0 && (rows === 1 ? `it ${one}` : `${count} ${count === 1 ? one : several}`);
  const roles = [...silent.roles].sort().slice(0, MOST_ROLES).map((role) => `'${role}'`).join(', ');
  const advice = [...silent.roles].every((role) => USUAL_ROLES.includes(role)) ? '' : "; rename the role that answers to 'assistant'";
  const unsaid = `no assistant turn to train on (roles: ${roles})${advice}`;
  const why = [
    of(empty, 'is empty', 'are empty'), of(dropped, `has more than ${limit} tokens`, `have more than ${limit} tokens`),
    of(spared, `has ${UNASKED}`, `have ${UNASKED}`), of(unlabeled - unreached - spared - silent.rows, 'has nothing to train on', 'have nothing to train on'),
    of(unreached, `has nothing to train on within ${limit} tokens`, `have nothing to train on within ${limit} tokens`),
    of(silent.rows, `has ${unsaid}`, `have ${unsaid}`),
  ].filter(Boolean);
  return `${rows === 1 ? 'The only row cannot' : `None of the ${rows} rows can`} be trained on: ${why.join(', ')}.`;
}
