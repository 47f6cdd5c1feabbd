/** The one form of conversations, whatever form they came in, and what templates want of it; as data/messages.py and data/conversations.py. */

import { Told } from './device.mjs';
import { isObject, isSome, OddNumber, parseJson, withValues } from './json.mjs';
import { isBlank, strip } from './strip.mjs';

/** Names of what a message thinks; templates read the first, or the second. */
export const REASONING = ['reasoning_content', 'thinking', 'reasoning'];
const NO_OPTIONS = [
  'messages', 'tools', 'documents', 'add_generation_prompt', 'continue_final_message', 'chat_template', 'tokenize', 'padding',
  'truncation', 'max_length', 'return_tensors', 'return_dict', 'return_assistant_tokens_mask', 'tokenizer_kwargs',
];

/** A row that holds nothing: it is left out and counted. */
export class EmptyRow extends Told {}

const isNothing = (value) => value === undefined || value === null || value === '' || (Array.isArray(value) && !value.length);

/** A JSON value whose objects have no nulls: tables fill keys that one lacks with them. */
export function withoutNulls(value) {
  if (isObject(value)) return withValues(value, (item) => (item === null ? undefined : withoutNulls(item)));
  return Array.isArray(value) ? value.map(withoutNulls) : value;
}

/**
 * A message in the one form.
 *
 * @param {unknown} given
 * @param {string} name What it is called in an error, such as message 2.
 * @throws {Told} If it is no message; an EmptyRow if its content is null, and there is nothing else in it.
 */
export function canonicalMessage(given, name) {
  if (!isObject(given)) throw new Told(`${name} must be an object, got ${kindOf(given)}`);
  const { tool_calls: listed, function_call: plain, ...message } = withoutNulls(given);
  if (typeof message.role !== 'string' || !message.role) throw new Told(`${name} must have a 'role' such as 'user' or 'assistant'`);
  let calls = fromJson(listed);
  const isPlain = !(plain === undefined || plain === '' || (isObject(plain) && !isSome(plain)));
  if (isNothing(calls) && isPlain) calls = [fromJson(plain, '{')];
  if (!isNothing(calls)) {
    if (!Array.isArray(calls)) throw new Told(`${name}: 'tool_calls' must be a list, got ${kindOf(calls)}`);
    message.tool_calls = calls.map((call) => canonicalCall(call, name));
  }
  if (!('content' in message)) {
    if (isNothing(calls) && !REASONING.some((key) => isSome(message[key]))) {
      if ('content' in given) throw new EmptyRow(`${name} has no content`);
      throw new Told(`${name}: 'content' is missing`);
    }
    message.content = '';
  }
  checkContent(message.content, name);
  return message;
}

function canonicalCall(call, name) {
  const called = isObject(call) && Object.hasOwn(call, 'function') ? call.function : call;
  if (!isObject(called) || typeof called.name !== 'string') throw new Told(`${name} has a tool call without the 'name' of a function`);
  const { parameters, ...known } = called;
  const { function: _, ...own } = called === call ? {} : call;
  if (called === call) { // the function's keys and the call's in one
    for (const key of ['id', 'type'].filter((each) => each in known)) {
      own[key] = known[key];
      delete known[key];
    }
  }
  const given = Object.hasOwn(called, 'arguments') ? called.arguments : parameters;
  return { type: 'function', ...own, function: { ...known, arguments: objectOf(given) } };
}

/** Arguments as an object; what models write as text need not be one, and stays as it is. */
function objectOf(given) {
  if (typeof given === 'string' && !isBlank(given)) {
    try {
      const parsed = parseJson(given);
      return isObject(parsed) ? parsed : given;
    } catch (error) {
      if (error instanceof Told) return given;
      throw error;
    }
  }
  return isObject(given) || isSome(given ?? null) ? given : {};
}

function checkContent(content, name) {
  if (typeof content === 'string') return;
  if (!Array.isArray(content) || !content.every(isObject)) throw new Told(`${name}: 'content' must be text, got ${kindOf(content)}`);
  if (!content.every((part) => part.type === 'text' && typeof part.text === 'string')) {
    throw new Told(`${name} has a part that is not supported (supported: text)`);
  }
}

/** Tools in the one form, each an object with its function; null where there are none. */
export function canonicalTools(value) {
  const tools = fromJson(value);
  if (isNothing(tools) || (typeof tools === 'string' && ['', 'null'].includes(strip(tools)))) return null;
  if (!Array.isArray(tools)) throw new Told("'tools' must be a list of objects");
  return tools.map((each) => {
    const tool = withoutNulls(fromJson(each, '{'));
    if (!isObject(tool)) throw new Told("'tools' must be a list of objects");
    const { type: _, ...named } = tool;
    return 'name' in tool && !('function' in tool) ? { type: 'function', function: named } : tool;
  });
}

/** What a row gives the chat template besides, as TRL's chat_template_kwargs. */
export function canonicalOptions(value) {
  const options = fromJson(value, '{');
  if ((options ?? null) === null || options === '') return {};
  if (!isObject(options)) throw new Told(`'chat_template_kwargs' must be an object, got ${kindOf(options)}`);
  const taken = NO_OPTIONS.find((key) => Object.hasOwn(options, key));
  if (taken) throw new Told(`'chat_template_kwargs' must not have '${taken}', which is set for every conversation: remove it`);
  return withoutNulls(options);
}

/** A list, or an object, that a table keeps as text. */
export function fromJson(value, opener = '[') {
  if (typeof value !== 'string' || !strip(value).startsWith(opener)) return value;
  return parsedAs(value, `${opener === '[' ? 'a list' : 'an object'} stored as text is`);
}

/** The value of a text; what is wrong with it is told behind some words. */
export function parsedAs(text, what) {
  try {
    return parseJson(text);
  } catch (error) {
    throw error instanceof Told ? new Told(`${what} ${error.message}`) : error;
  }
}

/** The kind of a JSON value, in words. */
export function kindOf(value) {
  if ((value ?? null) === null) return 'nothing';
  if (Array.isArray(value)) return 'a list';
  if (value instanceof OddNumber) return 'a number';
  return { object: 'an object', boolean: 'a boolean', number: 'a number' }[typeof value] ?? 'text';
}

/** A content as text, that of its parts one after the other. */
export function textOf(content) {
  if (Array.isArray(content)) return content.map((part) => part.text ?? '').join('');
  return typeof content === 'string' ? content : '';
}

// What a template wants.

const WORDS = ['Qtried0z', 'Qtried1z'];
const USER = { role: 'user', content: '?' };
const ANSWER = { role: 'assistant', content: '!' };
const AS_IT_IS = new RegExp(`['"](?:text|k)['"]: ?['"]${WORDS[0]}`);
const [OBJECT, TEXT] = [{ k: WORDS[0] }, `{"k": "${WORDS[0]}"}`];
const callWith = (given) => ({ role: 'assistant', content: '', tool_calls: [{ id: 'abcdefgh1', type: 'function', function: { name: 'f', arguments: given } }] });
const RESULT = { role: 'tool', name: 'f', tool_call_id: 'abcdefgh1', content: '!' };
const inParts = (content) => (typeof content === 'string' ? [{ type: 'text', text: content }] : content);
const FORMS = { text: WORDS.join(''), 'one part': inParts(WORDS.join('')), 'several parts': WORDS.flatMap(inParts) };
/** What a message of a role stands between, so that a template takes it. */
const AROUND = new Map([['user', [[], [ANSWER]]], ['assistant', [[USER], []]], ['tool', [[USER, callWith(OBJECT)], [ANSWER]]]]);

/** What a chat template wants of the one form: found by trying, once for each. */
export class TemplateForms {
  /**
   * @param {string} source The template's.
   * @param {(messages: object[]) => string|null} render Gives the text of messages, or null where the template refuses them.
   * @param {(value: object) => string} toJson An object as Python writes it.
   */
  constructor(source, render, toJson) {
    Object.assign(this, { source, render, toJson, shown: new Map(), text: null });
    this.knowsTools = /['"]tool['"]/.test(source);
  }

  /** A message as the template wants it. */
  adapted(message) {
    const adapted = { ...message, role: this._role(message.role) };
    if (isSome(message.content ?? null)) adapted.content = this._content(adapted.role, message.content);
    if (isSome(message.tool_calls ?? null) && this._wantsText()) adapted.tool_calls = message.tool_calls.map((call) => this._withText(call));
    return adapted;
  }

  _role(role) {
    if (role === 'developer' && !this.source.includes('developer')) return 'system';
    return role === 'function' && this.knowsTools ? 'tool' : role;
  }

  /** A content as text, unless the template walks over parts, or takes nothing else. */
  _content(role, content) {
    if (this._showsForm(role, typeof content === 'string' ? 'text' : 'several parts')) return content;
    const text = textOf(content);
    return this._showsForm(role, 'text') || !this._showsForm(role, 'one part') ? text : inParts(text);
  }

  /** Whether the template writes contents of a role in a form. */
  _showsForm(role, form) {
    const key = `${form} ${role}`;
    if (!this.shown.has(key)) {
      const [before, after] = AROUND.get(role) ?? [[], [USER, ANSWER]];
      const tried = [...before, { ...(role === 'tool' ? RESULT : {}), role, content: FORMS[form] }, ...after];
      let shows = showsWords(this.render(tried));
      // Some take nothing but parts, of anyone.
      if (!shows && form !== 'text') shows = showsWords(this.render(tried.map((each) => ({ ...each, content: inParts(each.content) }))));
      this.shown.set(key, shows);
    }
    return this.shown.get(key);
  }

  /** Whether arguments are to be JSON's text: an object fails, or stands there as Python's. */
  _wantsText() {
    if (this.text === null) {
      const asObject = this.render([USER, callWith(OBJECT), RESULT, ANSWER]);
      const isWritten = asObject !== null && asObject.includes(WORDS[0]) && !asObject.includes("{'k'");
      this.text = !isWritten && Boolean(this.render([USER, callWith(TEXT), RESULT, ANSWER])?.includes(TEXT));
    }
    return this.text;
  }

  _withText(call) {
    const given = call.function?.arguments;
    return isObject(given) ? { ...call, function: { ...call.function, arguments: this.toJson(given) } } : call;
  }
}

/** Whether a text has the words, and not their list as Python or JSON would write it. */
const showsWords = (text) => text !== null && WORDS.every((word) => text.includes(word)) && !AS_IT_IS.test(text);
