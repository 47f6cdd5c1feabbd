/** Text to token ids and back, and which passage of a text each token stands for. */

import { Tokenizer as Library } from './vendor/tokenizers.mjs';
import { Told } from './device.mjs';

const BYTES = /^<0x([0-9A-F]{2})>$/;
const SPACE = 0x20;
const utf8 = new TextEncoder();

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
      throw new Told(`tokenizer.json is not understood in the browser: ${error.message}`);
    }
    this.specialTokens = known.special_tokens;
    this.eosId = this.library.token_to_id(known.special_tokens.eos_token ?? '') ?? null;
    this.eosIds = new Set(known.eos_ids);
    this.added = new Map(file.added_tokens.map((token) => [token.content, token]));
    this.isByteLevel = JSON.stringify([file.pre_tokenizer, file.decoder]).includes('"ByteLevel"');
    this.isNFC = JSON.stringify(file.normalizer ?? null).includes('"NFC"');
  }

  encode(text, special = true) {
    return this.library.encode(text.toWellFormed(), { add_special_tokens: special }).ids;
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
    const bos = this.specialTokens.bos_token;
    const adds = special && !(bos && text.startsWith(bos));
    const alone = this.encode(text, adds);
    const { ids, learnt } = this.encodeMasked(`${text}A`, [[text.length, text.length + 1]], adds);
    const at = learnt.indexOf(true);
    const before = ids.slice(0, at < 0 ? ids.length : at);
    return this.shownText(before) === this.shownText(alone) ? before : alone;
  }

  /**
   * Tokens of a text, and which of them stand, at least in part, for characters in one of some spans.
   *
   * The library tells no places. They follow from the tokens' own bytes, which make up the text: with a
   * space that tokenizers of SentencePiece's kind put in front. Where they do not, the row is refused.
   *
   * @param {string} text
   * @param {[number, number][]} spans Ascending, disjoint.
   * @param {boolean} special Whether the tokenizer's own special tokens are added.
   * @returns {{ids: number[], learnt: boolean[]}}
   */
  encodeMasked(text, spans, special) {
    const whole = text.toWellFormed();
    const { ids, tokens } = this.library.encode(whole, { add_special_tokens: special });
    const bytes = utf8.encode(this.isNFC ? whole.normalize('NFC') : whole);
    const marks = spans.map((span) => span.map((at) => this._bytesBefore(whole, at)));
    let at = 0;
    let current = 0;
    const learnt = tokens.map((token, i) => {
      const own = this._bytesOf(token);
      const begin = at;
      if (matches(bytes, at, own)) at += own.length;
      else if (own[0] === SPACE && matches(bytes, at, own.subarray(1))) at += own.length - 1;
      else if (this._isAround(i, tokens)) return false;
      else {
        throw new Told(`the tokenizer changes this text ("${whole.slice(0, 40)}…"), so what is learnt cannot be told in the browser`);
      }
      const end = Math.max(at, begin + 1); // a space that was put in belongs to what follows
      while (current < marks.length && marks[current][1] <= begin) current++;
      return current < marks.length && marks[current][0] < end;
    });
    if (at !== bytes.length) {
      throw new Told(`the tokenizer leaves a part of this text out ("${whole.slice(0, 40)}…"), so what is learnt cannot be told in the browser`);
    }
    return { ids, learnt };
  }

  /** Whether a token stands before or behind the text: one that the tokenizer adds. */
  _isAround(i, tokens) {
    return (i === 0 || i === tokens.length - 1) && (this.added.get(tokens[i])?.special ?? false);
  }

  _bytesBefore(text, at) {
    const before = text.slice(0, at);
    return utf8.encode(this.isNFC ? before.normalize('NFC') : before).length;
  }

  _bytesOf(token) {
    if (this.added.has(token)) return utf8.encode(token);
    if (this.isByteLevel) return Uint8Array.from(token, (character) => BYTE_OF.get(character));
    const byte = BYTES.exec(token);
    return byte ? Uint8Array.of(parseInt(byte[1], 16)) : utf8.encode(token.replaceAll('\u2581', ' '));
  }
}

function matches(bytes, at, own) {
  if (at + own.length > bytes.length) return false;
  for (let i = 0; i < own.length; i++) if (bytes[at + i] !== own[i]) return false;
  return true;
}

/** GPT-2's characters for bytes: printable ones stand for themselves, the others follow from 256 on. */
const BYTE_OF = new Map();
{
  let next = 256;
  for (let byte = 0; byte < 256; byte++) {
    const printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    BYTE_OF.set(String.fromCodePoint(printable ? byte : next++), byte);
  }
}
