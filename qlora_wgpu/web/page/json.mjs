/** JSON of others, read as strictly as data/json_rows.py: no key twice, no NaN, no half characters, no endless depth. */

import { Told } from './device.mjs';

export const MOST_KEYS = 4096; // of an object, and columns of a table
const [MOST_DEPTH, MOST_DIGITS] = [65, 4300];
const SHOWN = 80; // characters of a key in a message
const SPACE = /[ \t\n\r]*/y;
const NUMBER = /-?(?:0|[1-9][0-9]*)((?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)/y;
const WORD = /true|false|null|NaN|-?Infinity/y;
const WORDS = { true: true, false: false, null: null };

/** A number that Python would write otherwise than a browser does, such as 1.0, which is 1 here. */
export class OddNumber {
  constructor(value) {
    this.value = value;
  }
}

/** What Python takes for true: lists and objects that hold something. */
export function isSome(value) {
  if (value instanceof OddNumber) return value.value !== 0;
  return value !== null && typeof value === 'object' ? Object.keys(value).length > 0 : Boolean(value);
}

export const isObject = (value) => value !== null && typeof value === 'object' && !Array.isArray(value) && !(value instanceof OddNumber);

/** Marks an object whose keys a browser puts into another order: those that are numbers come first. */
export const REORDERED = Symbol('reordered');

/** A copy of an object with other values, without those that are undefined; the mark stays. */
export function withValues(object, change) {
  const changed = Object.entries(object).map(([key, value]) => [key, change(value)]).filter(([, value]) => value !== undefined);
  const copy = Object.fromEntries(changed);
  if (object[REORDERED]) copy[REORDERED] = true;
  return copy;
}

/** The value that a text is. */
export function parseJson(text) {
  const reader = new JsonReader(text);
  const value = reader.value();
  if (reader.peek()) throw reader.wrong('Extra data');
  return value;
}

export class JsonReader {
  constructor(text) {
    Object.assign(this, { text, at: 0 });
  }

  /** The next character that is no white space; none at the end. */
  peek() {
    this._match(SPACE);
    return this.text.charAt(this.at);
  }

  /** Goes past a character, which must be there. */
  expect(character) {
    if (this.peek() !== character) throw this.wrong(`Expecting '${character}'`);
    this.at++;
  }

  /** Goes past a value, which it returns. */
  value(depth = 1) {
    const begins = this.peek();
    if (begins === '"') return this._string();
    if (begins === '{' || begins === '[') {
      if (depth > MOST_DEPTH) throw new Told(`the JSON is nested too deeply: more than ${MOST_DEPTH - 1} lists and objects`);
      return begins === '{' ? this._object(depth) : this._list(depth);
    }
    const word = this._word();
    return word === undefined ? this._number() : word;
  }

  /** What is told of a mistake at the present place. */
  wrong(reason) {
    const lines = this.text.slice(0, this.at).split('\n');
    const place = `${this.text.includes('\n') ? `line ${lines.length} ` : ''}column ${lines.at(-1).length + 1}`;
    return new Told(`not valid JSON (${reason} at ${place})`);
  }

  _match(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (found) this.at += found[0].length;
    return found;
  }

  _list(depth) {
    const items = [];
    this.items(']', () => items.push(this.value(depth + 1)));
    return items;
  }

  _object(depth) {
    const found = new Map();
    this.items('}', () => {
      if (this.peek() !== '"') throw this.wrong('Expecting property name enclosed in double quotes');
      const key = this._string();
      if (found.has(key)) throw new Told(`the key '${key.slice(0, SHOWN)}' occurs twice in one object`);
      this.expect(':');
      found.set(key, this.value(depth + 1));
    });
    if (found.size > MOST_KEYS) throw new Told(`an object has ${found.size.toLocaleString('en')} keys, more than ${MOST_KEYS.toLocaleString('en')}`);
    const made = Object.fromEntries(found); // which has a '__proto__' as any other key
    const keys = found.keys();
    if (Object.keys(made).some((key) => key !== keys.next().value)) made[REORDERED] = true;
    return made;
  }

  /** Goes past brackets, the first of which is next, and what stands between them. */
  items(end, item) {
    this.peek();
    this.at++;
    if (this.peek() === end) return void this.at++;
    for (;;) {
      item();
      if (this.peek() === end) return void this.at++;
      this.expect(',');
    }
  }

  _string() {
    const { text, at } = this;
    let end = at;
    do end = text.indexOf('"', end + 1);
    while (end > 0 && isEscaped(text, end));
    if (end < 0) throw this.wrong('Unterminated string');
    let value;
    try {
      value = JSON.parse(text.slice(at, end + 1));
    } catch {
      throw this.wrong('Invalid control character or escape in the text that begins');
    }
    if (!value.isWellFormed()) throw new Told('a string has a lone surrogate (half a character, such as \\ud83d)');
    this.at = end + 1;
    return value;
  }

  /** A word's value; undefined where there is none. */
  _word() {
    const [word] = this._match(WORD) ?? [];
    if (word !== undefined && !(word in WORDS)) throw new Told(`${word} is not valid JSON`);
    return WORDS[word];
  }

  _number() {
    const found = this._match(NUMBER);
    if (!found) throw this.wrong('Expecting value');
    const [source, beyond] = found;
    const value = Number(source);
    if (!beyond && source.length - source.startsWith('-') > MOST_DIGITS) throw new Told('a number has too many digits');
    return isAlike(value, Boolean(beyond)) ? value : new OddNumber(value);
  }
}

/** Whether Python and browsers write a number alike. */
function isAlike(value, isFloat) {
  if (!isFloat) return Number.isSafeInteger(value);
  return !Number.isInteger(value) && Math.abs(value) >= 1e-4 && Math.abs(value) < 1e16;
}

function isEscaped(text, at) {
  let begin = at;
  while (text[begin - 1] === '\\') begin--;
  return (at - begin) % 2 === 1;
}
