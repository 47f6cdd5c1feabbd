/** Text to token ids and back, and which passage of a text each token stands for. */

import { Tokenizer as Library } from './vendor/tokenizers.mjs';
import { Told } from './device.mjs';
import { MOST_AT_ONCE, sizeOf } from './long_text.mjs';
import { Places } from './places.mjs';
import { mend } from './pre_tokenizers.mjs';

const ANSWER = 'A';

export class Tokenizer {
  /**
   * @param {object} file tokenizer.json.
   * @param {{special_tokens: Record<string, string>, eos_ids: number[]}} known
   */
  constructor(file, known) {
    const saved = { ...file, truncation: null, padding: null };
    try {
      this.library = new Library(saved, {});
    } catch (error) {
      throw new Told(`tokenizer.json is not supported in the browser: ${error.message}`);
    }
    mend(this.library.pre_tokenizer, file.pre_tokenizer);
    this.specialTokens = known.special_tokens;
    this.eosId = this.library.token_to_id(known.special_tokens.eos_token ?? '') ?? null;
    this.eosIds = new Set(known.eos_ids);
    this.unknownId = this._unknownId();
    this.places = new Places(this.library, file);
  }

  /** Id of the token that stands for what is not known; null without one of its own. */
  _unknownId() {
    const { unk_token: unknown, bos_token: bos, eos_token: eos } = this.specialTokens;
    return unknown && unknown !== bos && unknown !== eos ? this.library.token_to_id(unknown) ?? null : null;
  }

  encode(text, special = true) {
    return this._placed(text, special).map(({ token }) => this._id(token));
  }

  /** Tokens of a text that goes on: an end token of the tokenizer's own, which rows have behind the answer, would end it. */
  encodeOpen(text, special) {
    return this._placed(text, special, true).map(({ token }) => this._id(token));
  }

  /** Whether a text begins with the token that begins texts, so that none is to be added. */
  begins(text) {
    const bos = this.specialTokens.bos_token;
    return Boolean(bos) && text.startsWith(bos);
  }

  decode(ids) {
    return ids.length ? this.library.decode(ids, { skip_special_tokens: true, clean_up_tokenization_spaces: false }) : '';
  }

  /** Tokens as people read them, special ones included. */
  shownText(ids) {
    return this.library.decode(ids, { skip_special_tokens: false, clean_up_tokenization_spaces: false });
  }

  /**
   * Tokens of a prompt as rows have them, where an answer follows: some tokenizers join white space otherwise
   * at the end of a text than before a word.
   */
  encodeBeforeAnswer(text, special) {
    const adds = special && !this.begins(text);
    const placed = this._placed(text + ANSWER, adds, true);
    const ids = placed.map(({ token }) => this._id(token));
    const found = placed.findIndex(({ end }) => end > text.length);
    const at = found < 0 ? ids.length : found;
    const before = ids.slice(0, at);
    const begins = found >= 0 && placed[at].begin >= text.length;
    if (begins && this.shownText(ids.slice(at)) === ANSWER) return before; // none holds some of both
    const alone = this.encodeOpen(text, adds);
    return this.shownText(before) === this.shownText(alone) ? before : alone;
  }

  /**
   * Tokens of a text, and which of them stand, at least in part, for characters in one of some spans.
   *
   * @param {string} text
   * @param {[number, number][]} spans Ascending, disjoint.
   * @param {boolean} special Whether the tokenizer's own special tokens are added.
   * @returns {{ids: number[], trained: boolean[]}}
   */
  encodeMasked(text, spans, special) {
    const placed = this._placed(text, special);
    let [covered, current] = [0, 0];
    const trained = placed.map(({ begin: start, end }) => {
      const begin = Math.min(start, covered); // white space between tokens belongs to what follows
      covered = Math.max(covered, end);
      while (current < spans.length && spans[current][1] <= begin) current++;
      return current < spans.length && Math.max(begin, spans[current][0]) < Math.min(end, spans[current][1]);
    });
    return { ids: placed.map(({ token }) => this._id(token)), trained };
  }

  /** Tokens with their places, and around them those that the tokenizer adds: before them alone, where a text is open. */
  _placed(text, special, open = false) {
    checkSize(text, MOST_AT_ONCE);
    if (!text.isWellFormed()) throw new Told('text with a lone surrogate (half a character) cannot be tokenized');
    const found = this.places.of(text);
    const { post_processor: around } = this.library;
    if (!around) return found;
    const all = around(found.map(({ token }) => token), null, special).tokens;
    if (all.length === found.length) return found;
    const first = firstPlace(all, found);
    return all.slice(0, open ? first + found.length : all.length).map((token, i) => found[i - first] ?? { token, begin: 0, end: 0 });
  }

  _id(token) {
    return this.library.added_tokens_map.get(token)?.id ?? this.library.model.tokens_to_ids.get(token) ?? this.library.model.tokens_to_ids.get(this.places.unknown);
  }
}

/**
 * @param {string} text
 * @param {number} most Bytes.
 * @throws {Told} If it has more.
 */
export function checkSize(text, most) {
  const size = sizeOf(text);
  if (size > most) throw new Told(`its text has ${size.toLocaleString('en')} bytes, more than ${most.toLocaleString('en')}: split it into several rows, or put a document into a .txt file`);
}

/** Where a text's tokens begin among all. */
function firstPlace(all, found) {
  const last = all.length - found.length;
  for (let first = 0; first <= last; first++) if (found.every(({ token }, i) => all[first + i] === token)) return first;
  throw new Told('the tokenizer post-processes tokens, which is not supported in the browser');
}
