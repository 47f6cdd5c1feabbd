/**
 * A word of its own in every part of a conversation: where the text has it, and what it leaves out; as data/marker_words.py.
 *
 * A template that is given other words writes the same around them. So the text of a conversation with marker words tells
 * where each part stands in the conversation's own text: for certain, where that text is the marked one with the words put
 * back.
 */

import { REASONING } from './canonical_messages.mjs';
import { isObject, isSome, OddNumber, withValues } from './json.mjs';
import { strip } from './strip.mjs';

const TOOLS = -1; // in place of a message's number
const WORD = /<[^<>\n]*>|\[\/?[A-Z_]+\]|([\p{L}\p{N}_]+)/gu; // tags are what templates look for
const THOUGHT = /(<think>.*?<\/think>|^(?:(?!<think>).)*?<\/think>)/s;
const [NUMBER, STEP, END] = [7_130_000_000, 10 ** 6, 10 ** 10]; // marks in place of numbers
const FORMS = [{}, { right: false }, { left: false }]; // of a passage, as templates strip it

const lstrip = (text) => strip(text, null, { right: false });
const rstrip = (text) => strip(text, null, { left: false });

/** Where something that a message says stands in the text: `behind` is where the word ends that is exchanged. */
const placed = (start, end, behind, number) => ({ start, end, behind, number });

export class MarkedConversation {
  /**
   * A conversation to put marks into.
   *
   * @param {string} text Its text.
   * @param {object[]} messages
   * @param {object[]|null} tools
   */
  constructor(text, messages, tools = null) {
    Object.assign(this, { text, messages: [...messages], tools, whole: false, marks: [] });
    this.word = unused(text);
    this.base = NUMBER;
    while (text.includes(this._stem()) && this.base < END) this.base += STEP;
    this.pattern = new RegExp(`${this.word}x([0-9]+)y|${this._stem()}([0-9]{6})(?:\\.5)?`, 'g');
  }

  _stem() {
    return String(this.base).slice(0, 4);
  }

  /** The parts that have a mark, by what they are called: the number of a message, or that of the tools, and a kind. */
  parts() {
    return new Map(this.marks.map(({ part }) => [nameOf(part), part]));
  }

  /** The numbers of marks in a text, and where they stand. */
  found(marked) {
    return [...marked.matchAll(this.pattern)].map((match) => ({ number: Number(match[1] ?? match[2]), start: match.index, end: match.index + match[0].length }));
  }

  /** The parts that a text has no mark of. */
  leftOut(marked) {
    const left = this.parts();
    for (const { number } of this.found(marked)) left.delete(nameOf(this.marks[number].part));
    return left;
  }

  /**
   * Where the parts of messages stand in the conversation's own text, in order, by the messages' numbers; nothing where that
   * text is another one.
   *
   * @param {string|null} marked The text of these messages; null where the template refuses them.
   * @returns {Map<number, {start: number, end: number, behind: number, number: number}[]>}
   */
  places(marked) {
    if (marked === null) return new Map();
    const forms = [(passage) => passage, ...(this.whole ? FORMS.map((form) => (passage) => strip(passage, null, form)) : [])];
    for (const form of forms) {
      const found = this._places(marked, form);
      if (found) return found;
    }
    return new Map();
  }

  _places(marked, form) {
    const { text } = this;
    let [at, last] = [0, 0];
    const places = new Map();
    const seen = new Set();
    for (const { number, start: begin, end: stop } of this.found(marked)) {
      const mark = this.marks[number];
      const passage = form(mark.passage);
      const written = marked.slice(last, begin) + passage;
      if (!text.startsWith(written, at)) return null;
      [at, last] = [at + written.length, stop];
      if (seen.has(number)) continue; // such as a name that is written once more with the result
      seen.add(number);
      const start = at - passage.length;
      const before = [mark.before, lstrip(mark.before)].find((each) => text.endsWith(each, start)) ?? '';
      const after = [mark.after, rstrip(mark.after)].find((each) => text.startsWith(each, at)) ?? '';
      const { message } = mark.part;
      if (!places.has(message)) places.set(message, []);
      places.get(message).push(placed(start - before.length, at + after.length, at, number));
    }
    return text.slice(at) === marked.slice(last) ? places : null;
  }

  /** Puts marks into a message. */
  mark(number) {
    const message = { ...this.messages[number] };
    if (isSome(message.content)) message.content = this._content(message.content, number, message.role);
    for (const key of REASONING) {
      if (typeof message[key] === 'string') message[key] = this._text(message[key], { message: number, kind: 'thought' });
    }
    if (isSome(message.tool_calls ?? null)) message.tool_calls = message.tool_calls.map((call) => this._call(call, { message: number, kind: 'call' }));
    this.messages[number] = message;
  }

  /** Exchanges a message's content as a whole; then what a template keeps of it need not be all of it. */
  markContent(number, content) {
    const message = this.messages[number];
    const mark = this._new({ message: number, kind: 'content' }, content);
    this.whole = true;
    this.messages[number] = { ...message, content: Array.isArray(message.content) ? [{ type: 'text', text: mark }] : mark };
  }

  /** Puts a mark into the name and the description of each tool. */
  markTools() {
    this.tools = (this.tools ?? []).map((tool) => {
      if (!isObject(tool.function)) return tool;
      const marked = { ...tool.function };
      for (const key of ['name', 'description']) {
        if (isSome(marked[key] ?? null)) marked[key] = this._new({ message: TOOLS, kind: 'tool' }, String(marked[key]));
      }
      return { ...tool, function: marked };
    });
  }

  _content(content, number, role) {
    if (Array.isArray(content)) return content.map((part) => ({ ...part, text: this._content(part.text, number, role) }));
    if (role !== 'assistant' || !content.includes('</think>')) return this._text(content, { message: number, kind: 'content' });
    return content.split(THOUGHT).map((piece, i) => this._text(piece, { message: number, kind: i % 2 ? 'thought' : 'content' })).join('');
  }

  _call(call, part) {
    const before = this.marks.length;
    const changed = { ...call.function, arguments: this._value(call.function.arguments, part) };
    if (this.marks.length === before) changed.name = this._new(part, changed.name);
    return { ...call, function: changed };
  }

  _value(value, part) {
    if (typeof value === 'string') return this._text(value, part);
    if (Array.isArray(value)) return value.map((item) => this._value(item, part));
    if (isObject(value)) return withValues(value, (item) => this._value(item, part));
    const number = value instanceof OddNumber ? value.value : value;
    if (typeof number !== 'number') return value;
    this._new(part, String(number));
    return this.base + this.marks.length - 1 + (Number.isInteger(number) ? 0 : 0.5);
  }

  /** A text with its first word and its last one exchanged; without words all of it. */
  _text(text, part) {
    let words = [...text.matchAll(WORD)].filter((match) => match[1]).map((match) => [match.index, match.index + match[0].length]);
    if (!words.length) {
      const bare = strip(text);
      if (!bare) return text;
      words = [[text.indexOf(bare), text.indexOf(bare) + bare.length]];
    }
    let [marked, end] = ['', 0];
    for (const [start, stop] of new Set([words[0], words.at(-1)])) {
      marked += text.slice(end, start) + this._new(part, text.slice(start, stop), text.slice(0, start), text.slice(stop));
      end = stop;
    }
    return marked + text.slice(end);
  }

  _new(part, passage, before = '', after = '') {
    this.marks.push({ part, passage, before, after });
    return `${this.word}x${this.marks.length - 1}y`;
  }
}

/** What a part is called among those of a conversation. */
export const nameOf = ({ message, kind }) => `${kind} ${message}`;

/** The number of characters that two texts begin with alike; none is cut in two. */
export function commonPrefix(a, b) {
  const most = Math.min(a.length, b.length);
  let at = 0;
  while (at < most && a[at] === b[at]) at++;
  return /[\ud800-\udbff]/.test(a[at - 1] ?? '') ? at - 1 : at;
}

/** A word that a text does not hold. */
export function unused(text) {
  for (let number = 0; ; number++) {
    const word = `Qsentinel${number}z`;
    if (!text.includes(word)) return word;
  }
}
