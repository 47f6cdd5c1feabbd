/**
 * Tokens of a text with their places in it, which the library does not tell.
 *
 * Its parts are called one by one, as the tokenizers library in Rust calls its own: added tokens are cut out, the rest
 * is normalized, cut into words, and words into tokens. At each step it is known what of the text a piece stands for.
 */

import { Told } from './device.mjs';

const SPACE = /[\t-\r \u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]/; // as Rust has it
const LEADING = new RegExp(`^${SPACE.source}+`);
const TRAILING = new RegExp(`${SPACE.source}+$`);
const CLUSTERS = /[\u1100-\u11ff\uac00-\ud7ff]+\p{M}*|\P{M}\p{M}*|\p{M}+/gu; // no normalization joins two of these
const BYTE = /^<0x[0-9A-F]{2}>$/;
const LOW_LINE = '\u2581'; // SentencePiece's space
const utf8 = new TextEncoder();

/** A token and the range of the text that it stands for. */
const placed = (token, begin, end) => ({ token, begin, end });

export class Places {
  /**
   * @param {import('./vendor/tokenizers.mjs').Tokenizer} library
   * @param {object} file tokenizer.json.
   */
  constructor(library, file) {
    this.library = library;
    this.added = library.added_tokens_map;
    this.isByteLevel = JSON.stringify([file.pre_tokenizer, file.decoder]).includes('"ByteLevel"');
    const { type, unk_token: unknown, continuing_subword_prefix: within, end_of_word_suffix: ending } = file.model;
    this.unknown = unknown ?? library.model.unk_token;
    this.joinsUnknown = type === 'Unigram' || library.model.fuse_unk;
    this.areWords = type === 'WordLevel' || type === 'WordPiece';
    Object.assign(this, { within: within ?? '', ending: ending ?? '' });
    this.space = JSON.stringify(file.pre_tokenizer ?? null).includes('"Metaspace"') ? LOW_LINE : ' ';
    this.prefix = this._prefix();
  }

  /** The tokens of a text, without those around it. */
  of(text) {
    const found = [];
    const sections = this._cut(text, this.library.splitter_unnormalized);
    sections.forEach(({ piece, begin, end, token }, number) => {
      if (token) found.push(placed(piece, begin, end));
      else if (piece) this._section(piece, begin, number, found);
    });
    return found;
  }

  /** Pieces between added tokens, and these; an added token may take the white space beside it. */
  _cut(text, splitter) {
    const pieces = [];
    let at = 0;
    for (const piece of splitter.split(text)) {
      const token = this.added.get(piece);
      let [begin, end] = [at, at + piece.length];
      const before = pieces.at(-1);
      if (token?.lstrip && before && !before.token) {
        begin -= TRAILING.exec(before.piece)?.[0].length ?? 0;
        [before.piece, before.end] = [before.piece.slice(0, begin - before.begin), begin];
      }
      if (!token && before?.token?.rstrip) {
        begin += LEADING.exec(piece)?.[0].length ?? 0;
        before.end = begin;
      }
      pieces.push({ piece: token ? piece : piece.slice(begin - at), begin, end, token });
      at = end;
    }
    return pieces;
  }

  _section(text, offset, number, found) {
    const { text: normal, begins, ends } = this._normalized(text);
    const range = (begin, end) => [offset + (begins[begin] ?? text.length), offset + (end > begin ? ends[end - 1] : begins[begin] ?? text.length)];
    for (const { piece, begin, end, token } of this._cut(normal, this.library.splitter_normalized)) {
      if (token) {
        found.push(placed(piece, ...range(begin, end)));
      } else if (piece) {
        const { pre_tokenizer: cut } = this.library;
        this._words(piece, cut ? cut(piece, { section_index: number }) : [piece], (first, last) => range(begin + first, begin + last), found);
      }
    }
  }

  /** A text as the normalizer has it, and of each of its UTF-16 units where what it stands for begins and ends. */
  _normalized(text) {
    const { normalizer } = this.library;
    const whole = normalizer ? normalizer(text) : text;
    const units = Array.from({ length: text.length }, (_, i) => i);
    if (whole === text) return { text, begins: units, ends: units.map((i) => i + 1) };
    const made = { text: '', begins: [], ends: [] };
    const add = (piece, begin, end, alike) => {
      for (let i = 0; i < piece.length; i++) {
        made.begins.push(alike ? begin + i : begin);
        made.ends.push(alike ? begin + i + 1 : end);
      }
      made.text += piece;
    };
    const clusters = [...text.matchAll(CLUSTERS)];
    if (whole.startsWith(this.prefix)) add(this.prefix, 0, clusters[0][0].length, false);
    for (const { 0: cluster, index } of clusters) {
      const piece = normalizer(cluster);
      const bare = piece.startsWith(this.prefix) ? piece.slice(this.prefix.length) : piece;
      add(bare, index, index + cluster.length, bare.length === cluster.length);
    }
    if (made.text !== whole) throw changed(text);
    return made;
  }

  /** What the normalizer puts before any text. */
  _prefix() {
    const made = this.library.normalizer?.('a') ?? 'a';
    return made.length > 1 && made.endsWith('a') ? made.slice(0, -1) : '';
  }

  /** Finds words, which may lack white space of the text or begin with a space that was put in. */
  _words(text, words, range, found) {
    const units = this._units(text);
    let at = 0;
    for (const word of words) {
      const own = [...word];
      let first = at;
      while (!matches(units, first, own, 0, this.space) && first < units.length && SPACE.test(units[first].text)) first++;
      let added = 0; // symbols that the text does not have
      if (!matches(units, first, own, 0, this.space)) [first, added] = [at, 1];
      if (added && !(isBlank(own[0]) && matches(units, first, own, 1, this.space))) throw changed(text);
      at = first + own.length - added;
      // A space that was put in stands for what follows it, as in Rust.
      const places = own.map((_, i) => {
        const { begin, end } = units[Math.max(first + i - added, first)] ?? { begin: text.length, end: text.length };
        return [begin, end];
      });
      this._tokens(word, places, range, found);
    }
  }

  /** The tokens of a word, each with as many symbols as it has. */
  _tokens(word, places, range, found) {
    const characters = [...word];
    const tokens = this.library.model([word]);
    let at = 0;
    let bytes = 0; // of the character there, that tokens of single bytes stand for
    tokens.forEach((token, index) => {
      const place = places[at];
      if (!place) throw changed(word);
      if (BYTE.test(token) && !this.isByteLevel) {
        found.push(placed(token, ...range(...place)));
        bytes = (bytes + 1) % utf8.encode(characters[at]).length;
        if (!bytes) at++;
        return;
      }
      const count = token === this.unknown ? this._unknown(characters, at) : [...this._bare(token, index, tokens.length)].length;
      at += count;
      if (!count || at > places.length) throw changed(word);
      found.push(placed(token, ...range(place[0], places[at - 1][1])));
    });
    if (at !== places.length) throw changed(word);
  }

  /** How many characters an unknown token stands for. */
  _unknown(characters, at) {
    if (this.areWords) return characters.length - at;
    if (!this.joinsUnknown) return 1;
    let end = at + 1;
    while (end < characters.length && !this.library.model.tokens_to_ids.has(characters[end])) end++;
    return end - at;
  }

  _bare(token, index, count) {
    let bare = token;
    if (index > 0 && this.within && bare.startsWith(this.within)) bare = bare.slice(this.within.length);
    if (index === count - 1 && this.ending && bare.endsWith(this.ending)) bare = bare.slice(0, -this.ending.length);
    return bare;
  }

  /** What a text is compared by: bytes, or characters; each with its place. */
  _units(text) {
    const units = [];
    let at = 0;
    for (const character of text) {
      const place = { begin: at, end: (at += character.length) };
      if (this.isByteLevel) for (const byte of utf8.encode(character)) units.push({ symbol: CHARACTER_OF[byte], text: character, ...place });
      else units.push({ symbol: character, text: character, ...place });
    }
    return units;
  }
}

/** Whether symbols stand at a place of a text, but for the first so many; its spaces may be written otherwise. */
function matches(units, at, own, from, space) {
  if (at + own.length - from > units.length) return false;
  for (let i = from; i < own.length; i++) {
    const { symbol } = units[at + i - from];
    if (symbol !== own[i] && !(own[i] === space && symbol === ' ')) return false;
  }
  return true;
}

function changed(text) {
  return new Told(`the tokenizer changes this text ("${text.slice(0, 40)}…"), so the loss mask cannot be computed in the browser`);
}

/** GPT-2's characters for bytes: printable ones stand for themselves, the others follow from 256 on. */
const CHARACTER_OF = [];
{
  let next = 256;
  for (let byte = 0; byte < 256; byte++) {
    const printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    CHARACTER_OF.push(String.fromCodePoint(printable ? byte : next++));
  }
}
const isBlank = (symbol) => symbol === ' ' || symbol === LOW_LINE || symbol === CHARACTER_OF[32];
