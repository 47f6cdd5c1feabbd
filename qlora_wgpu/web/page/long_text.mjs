/** Documents as token ids, in pieces, as data/examples.py: what a tokenizer takes grows with what it is given at once. */

import { isSpace } from './strip.mjs';

export const MOST_AT_ONCE = 3 << 19; // bytes
export const MOST_OF_A_ROW = 4 << 20;

const utf8 = new TextEncoder();

/** Bytes of a text. */
export const sizeOf = (text) => utf8.encode(text).length;

/** Cuts a text into pieces for a tokenizer, one unless it is large, that end where a line does, if there is one. */
export function* piecesOf(text) {
  const room = new Uint8Array(MOST_AT_ONCE);
  let rest = text;
  for (;;) {
    const longest = utf8.encodeInto(rest.slice(0, MOST_AT_ONCE + 1), room).read;
    if (longest === rest.length) return yield rest;
    const end = seam(rest, longest);
    yield rest.slice(0, end);
    rest = rest.slice(end);
  }
}

/**
 * Token ids of a document, piece by piece.
 *
 * @param {import('./tokens.mjs').Tokenizer} tokenizer
 * @param {string} text
 * @param {boolean} special Whether the document, not every piece, begins and ends as the tokenizer says.
 * @returns {Iterable<{ids: number[], done: number}>} With how many characters are done.
 */
export function* documentIds(tokenizer, text, special = true) {
  const pieces = [...piecesOf(text)];
  if (pieces.length === 1) return yield { ids: tokenizer.encode(text, special), done: text.length };
  const [front, back] = special ? around(tokenizer) : [[], []];
  let done = 0;
  for (const [index, piece] of pieces.entries()) {
    const ids = tokenizer.encode(piece, false);
    done += piece.length;
    yield { ids: [index ? [] : front, ids, done < text.length ? [] : back].flat(), done };
  }
}

/** Where the first piece of a text ends: after its last line, else its last word that fits. */
function seam(text, longest) {
  const half = middle(text, longest);
  for (let at = text.lastIndexOf('\n', longest - 1); at >= half; at = text.lastIndexOf('\n', at - 1)) {
    if (!isSpace(text[at + 1])) return at + 1; // before a word: there, tokenizers that split text at all split it, too
  }
  const space = text.lastIndexOf(' ', longest - 1);
  return space >= half ? space : longest;
}

/** Where half of a text's first characters end, which Python does not count by UTF-16's units. */
function middle(text, longest) {
  let count = 0;
  for (let at = 0; at < longest; at += text.codePointAt(at) > 0xffff ? 2 : 1) count++;
  let at = 0;
  for (let left = count >> 1; left; left--) at += text.codePointAt(at) > 0xffff ? 2 : 1;
  return at;
}

/** The special tokens that a tokenizer puts before and behind a text. */
function around(tokenizer) {
  const [bare, whole] = [tokenizer.encode('a', false), tokenizer.encode('a', true)];
  const begin = Math.max(0, whole.findIndex((_, at) => bare.every((id, i) => whole[at + i] === id)));
  return [whole.slice(0, begin), whole.slice(begin + bare.length)];
}
