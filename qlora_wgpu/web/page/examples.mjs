/** Rows as token ids and labels, as data/formats.py and data/row_source.py make them. */

import { conversationOf, EmptyRow, formatOf } from './conversations.mjs';
import { Told } from './device.mjs';
import { assistantSpans, lastTurnSpans } from './masking.mjs';

const IGNORED = -100;
const TASK = 'Below is an instruction that describes a task';
const REQUEST = 'Write a response that appropriately completes the request.';

export class RowEncoder {
  /**
   * @param {import('./tokens.mjs').Tokenizer} tokenizer
   * @param {import('./chat.mjs').ChatTemplate|null} template
   * @param {{train_on: string, max_length: number, truncation: string, format: string, columns: Record<string, string>}} how
   */
  constructor(tokenizer, template, how) {
    Object.assign(this, { tokenizer, template, how });
  }

  /**
   * All examples of some rows, and what became of the others.
   *
   * @param {{where: string, row: object}[]} rows
   * @param {(done: number) => void} progress
   */
  examples(rows, progress = () => {}) {
    const counts = { rows: rows.length, empty: 0, truncated: 0, dropped: 0, without_labels: 0 };
    const examples = [];
    let format = null;
    rows.forEach(({ where, row: given }, index) => {
      if (index % 100 === 0) progress(index);
      try {
        if (Object.values(given).every((value) => value === null)) throw new EmptyRow('the row has no value');
        const row = this._named(given);
        format ??= formatOf(row, this.how.format);
        const whole = this.encode(row, formatOf(row, format));
        const cut = this._cut(whole, where);
        if (!cut) counts.dropped++;
        else if (!cut.labels.slice(1).some((label) => label !== IGNORED)) counts.without_labels++;
        else {
          if (cut !== whole) counts.truncated++;
          examples.push(cut);
        }
      } catch (error) {
        if (error instanceof EmptyRow) counts.empty++;
        else if (error instanceof Told) throw new Told(error.message.startsWith(where) ? error.message : `${where}: ${error.message}`);
        else throw error;
      }
    });
    if (!examples.length) throw new Told(nothing(counts));
    return { examples, counts, format };
  }

  _named(row) {
    const renamed = { ...row };
    for (const [key, column] of Object.entries(this.how.columns)) {
      if (!(column in row)) throw new Told(`the column '${column}' is to be its '${key}', but it has none such`);
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
    if (format === 'messages' || format === 'conversations') return this._chat(format, row);
    if (format === 'prompt/completion') return this._answer(textOf(row, 'prompt'), textOf(row, 'completion'));
    if (format === 'instruction/output') return this._instruction(row);
    return this._text(row);
  }

  _chat(key, row) {
    const { messages, tools } = conversationOf(key, row);
    if (!this.template) throw new Told('the rows are conversations, but this site has no chat template: write it with data.chat_template');
    const last = ['last_turn', 'completion'].includes(this.how.train_on);
    const eos = this.tokenizer.specialTokens.eos_token;
    const found = (last ? lastTurnSpans : assistantSpans)(this.template, messages, tools, eos);
    const spans = this.how.train_on === 'all' ? [[0, found.text.length]] : found.spans;
    return this._masked(found.text, spans, false);
  }

  _instruction(row) {
    const extra = (row.input ?? null) === null ? '' : textOf(row, 'input');
    const system = (row.system ?? null) === null ? '' : textOf(row, 'system');
    const output = textOf(row, 'output');
    const instruction = textOf(row, 'instruction');
    requireText(instruction + extra + output);
    return this._answer(alpacaPrompt(instruction, extra, system, row.history ?? []), output);
  }

  _text(row) {
    if (!['auto', 'all'].includes(this.how.train_on)) throw new Told("a 'text' has no turns: write the site with data.train_on set to all");
    const text = textOf(row, 'text');
    requireText(text);
    const ids = this.tokenizer.encode(text, this._needsSpecial(text));
    return this._ended(ids, [...ids]);
  }

  _answer(prompt, answer) {
    const text = prompt + answer;
    requireText(text);
    const { ids, labels } = this._masked(text, [[prompt.length, text.length]], this._needsSpecial(text));
    const ended = this._ended(ids, labels);
    return this.how.train_on === 'all' ? { ids: ended.ids, labels: [...ended.ids] } : ended;
  }

  _needsSpecial(text) {
    const bos = this.tokenizer.specialTokens.bos_token;
    return !(bos && text.startsWith(bos));
  }

  /** The row with the end-of-sequence token behind it, which is learnt. */
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
    const { ids, learnt } = this.tokenizer.encodeMasked(text, spans, special);
    return { ids, labels: ids.map((id, i) => (learnt[i] ? id : IGNORED)) };
  }
}

/** The prompt of an instruction, in Stanford Alpaca's wording. */
export function alpacaPrompt(instruction, extra = '', system = '', history = []) {
  const task = extra.trim() ? `${TASK}, paired with an input that provides further context.` : `${TASK}.`;
  const parts = [system.trim() ? system : `${task} ${REQUEST}`];
  for (const [earlier, answer] of history) parts.push(`### Instruction:\n${earlier}`, `### Response:\n${answer}`);
  parts.push(`### Instruction:\n${instruction}`);
  if (extra.trim()) parts.push(`### Input:\n${extra}`);
  return [...parts, '### Response:\n'].join('\n\n');
}

function textOf(row, key) {
  if (typeof row[key] !== 'string') throw new Told(`'${key}' must be text`);
  return row[key];
}

function requireText(text) {
  if (!text.trim()) throw new EmptyRow('the row has no text at all');
}

function nothing({ rows, empty, dropped, without_labels: unlearnt }) {
  const why = [
    empty && `${empty} hold nothing`, dropped && `${dropped} are too long`, unlearnt && `in ${unlearnt} nothing is learnt`,
  ].filter(Boolean);
  return `None of the ${rows} rows can be trained on: ${why.join(', ')}.`;
}
