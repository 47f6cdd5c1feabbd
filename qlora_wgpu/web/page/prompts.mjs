/** How prompts are written for what a model was trained on, and where answers end; as data/prompts.py. */

import { ChatTemplate } from './chat.mjs';
import { CHATS, conversationOf } from './conversations.mjs';
import { Told } from './device.mjs';
import { isBlank } from './strip.mjs';

const SHOWN = 60; // characters of a text that is to be continued
const TRIED = 100; // prompts that are too long, or not all of it
const NO_TOKENS = { bos_token: '', eos_token: '' };

/** The kind of prompts of rows in a format: turns of a chat template, Alpaca's, or a text. */
export function kindOf(format) {
  if (CHATS.includes(format)) return 'chat';
  return format === 'instruction/output' ? 'alpaca' : 'text';
}

/**
 * What the first row asks that asks anything by itself, and leaves room for an answer, for a sample before and after.
 *
 * @param {{row: object, document?: boolean}[]} rows
 * @param {string} format
 * @param {import('./examples.mjs').RowEncoder} encoder What has encoded them.
 * @param {(text: string) => boolean} hasRoom
 */
export function firstPrompt(rows, format, encoder, hasRoom) {
  let [tried, other] = [0, '']; // of the first row whose question is a part of its prompt
  for (const { row, document } of rows) {
    try {
      const named = document ? row : encoder.named(row);
      const found = promptOf(named, format);
      const text = Array.isArray(found) ? found.map((part) => part.text).join('') : found ?? '';
      if (isBlank(text)) continue;
      const fits = hasRoom(text);
      if (fits && asksAll(named, format)) return text;
      if (fits) other ||= text;
      if (++tried === TRIED) break;
    } catch (error) {
      if (!(error instanceof Told)) throw error; // else the row was left out, or is no prompt by itself
    }
  }
  return other;
}

function promptOf(row, format) {
  if (CHATS.includes(format)) return conversationOf(format, row).messages.find(({ role }) => role === 'user')?.content;
  if (format === 'prompt/completion') return row.prompt;
  if (format === 'instruction/output') return row.instruction;
  return row.text?.slice(0, SHOWN).replace(/[\ud800-\udbff]$/, ''); // no half of a character
}

/** Whether what a row asks is all of its prompt: an instruction may have an input. */
function asksAll({ input, system }, format) {
  return format !== 'instruction/output' || [input, system].every((text) => isBlank(text ?? ''));
}

export class Prompts {
  /**
   * @param {Record<string, {turn_end: number|null, stop_text: string, files: Record<string, string>}>} kinds As web/site.py
   *   writes them.
   * @param {import('./tokens.mjs').Tokenizer} tokenizer
   * @param {ChatTemplate|null} template The chat template.
   * @param {string} alpaca Alpaca's.
   */
  constructor(kinds, tokenizer, template, alpaca) {
    Object.assign(this, { kinds, tokenizer, template, alpaca: new ChatTemplate(alpaca, NO_TOKENS) });
  }

  /** Tokens of a conversation up to where the model is to speak; of texts, the last one's. */
  ids(kind, messages) {
    const { tokenizer, template } = this;
    if (kind === 'chat' && template) return tokenizer.encodeBeforeAnswer(template.render(messages, true).text, false);
    if (kind === 'alpaca') return tokenizer.encodeBeforeAnswer(this.alpaca.render(messages).text, true);
    return tokenizer.encodeOpen(messages.at(-1).content, !tokenizer.begins(messages.at(-1).content));
  }

  /** What ends an answer: tokens, and a text where a turn has no token that does. */
  ends(kind) {
    const { turn_end: end, stop_text: text } = this.kinds[kind];
    return { stop: new Set([...this.tokenizer.eosIds, ...(end === null ? [] : [end])]), text };
  }

  /** The files that are kept beside an adapter, but for the tokenizer. */
  files(kind) {
    return this.kinds[kind].files;
  }
}
