/** Chat templates: from messages to the text a model was trained on, as data/chat_template.py. */

import { Template } from './vendor/jinja.mjs';
import { REASONING, TemplateForms } from './canonical_messages.mjs';
import { Told } from './device.mjs';
import { OddNumber, REORDERED } from './json.mjs';
import { NotHere, Notation } from './python_jinja.mjs';

const [START, END] = ['\ufdd0', '\ufdd1']; // around what the assistant writes
const NUMBER = `${START}\ufdd2${END}`; // in place of a number that Python writes in its own way
const GENERATION = /\{%([-+]?)\s*(generation|endgeneration)\s*([-+]?)%\}/g;
const MOST_OTHERS = 64; // templates with options that are remembered
const JSON_TEXT = new Template('{{ value | tojson }}');

export class ChatTemplate {
  /**
   * @param {string} source Jinja.
   * @param {Record<string, string>} specialTokens Texts by name, such as bos_token, and what else the template is given.
   * @param {string|null} toolSource That of the template for conversations with tools, if it is another one.
   */
  constructor(source, specialTokens, toolSource = null) {
    Object.assign(this, { source, specialTokens, toolSource, others: new Map() });
    this.forms = new TemplateForms(source, (messages) => this._tried(messages), (value) => JSON_TEXT.render({ value }));
    this.marks = /\{%[-+]?\s*generation\s*[-+]?%\}/.test(source);
    // The tags become blocks that write a mark; white space around them is cut as it would be.
    const marked = source.replace(GENERATION, (_, left, tag, right) =>
      `{%${left} if true -%}{{- "${tag === 'generation' ? START : END}" -}}{%- endif ${right}%}`);
    try {
      this.template = new Template(marked);
    } catch (error) {
      throw new Told(`The chat template is broken: ${error.message}`);
    }
  }

  /** The template that writes a conversation, with the options that it gives: the one for tools where there are any. */
  suited({ tools, options }) {
    const source = (tools && this.toolSource) || this.source;
    if (source === this.source && !Object.keys(options).length) return this;
    const variables = plain(options);
    const key = JSON.stringify([source, variables]);
    if (!this.others.has(key)) {
      if (this.others.size >= MOST_OTHERS) this.others.clear();
      this.others.set(key, new ChatTemplate(source, { ...this.specialTokens, ...variables }));
    }
    return this.others.get(key);
  }

  /**
   * @param {object[]} messages In the one form.
   * @param {boolean} prompt Whether it ends with the header of an assistant's turn.
   * @param {object[]|null} tools
   * @returns {{text: string, spans: [number, number][]|null}} The spans of what the assistant writes, if they are marked.
   * @throws {Told} If the template refuses the conversation.
   */
  render(messages, prompt = false, tools = null) {
    const adapted = messages.map((message) => this.forms.adapted(plainMessage(message)));
    let marked;
    try {
      marked = this._written(adapted, prompt, plain(tools));
    } catch (error) {
      const Kind = error instanceof NotHere ? NotHere : Told;
      throw new Kind(`the chat template cannot render this conversation: ${error.message}`);
    }
    if (marked.includes(NUMBER)) {
      throw new NotHere('the chat template prints a number that Python formats differently, such as 1.0 or one beyond 2^53: store it as text');
    }
    const { text, spans } = takeMarks(marked);
    return { text, spans: this.marks ? spans : null };
  }

  /** The text of a conversation, or null where the template refuses it. */
  textOf(messages, prompt = false, tools = null) {
    try {
      return this.render(messages, prompt, tools).text;
    } catch (error) {
      if (error instanceof NotHere || !(error instanceof Told)) throw error;
      return null;
    }
  }

  /** The text of messages as they are, or null where the template refuses them. */
  _tried(messages) {
    try {
      return takeMarks(this._written(messages, false, null)).text;
    } catch (error) {
      if (error instanceof NotHere && !(error instanceof Notation)) throw error;
      return null;
    }
  }

  _written(messages, prompt, tools) {
    return this.template.render({ ...this.specialTokens, messages, tools, documents: null, add_generation_prompt: prompt });
  }
}

function plainMessage(message) {
  const key = REASONING.find((name) => message[name]);
  const whole = key ? { thinking: message[key], ...message, reasoning_content: message[key] } : message;
  return plain(whole);
}

/** A copy of JSON values without the marks that only this module may set. */
function plain(value) {
  if (typeof value === 'string') return value.replaceAll(START, '\ufffd').replaceAll(END, '\ufffd');
  if (Array.isArray(value)) return value.map(plain);
  if (value instanceof OddNumber) return NUMBER;
  if (value && typeof value === 'object') {
    if (value[REORDERED]) throw new NotHere(`the keys ${Object.keys(value).slice(0, 4).join(', ')} of an object would have another order in the browser: start them with a letter`);
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [plain(k), plain(v)]));
  }
  return value;
}

/** Removes the marks; nested ones count as the outermost. */
function takeMarks(marked) {
  let text = '';
  const spans = [];
  let [depth, start] = [0, 0];
  for (const piece of marked.split(/([\ufdd0\ufdd1])/)) {
    if (piece === START) {
      if (depth++ === 0) start = text.length;
    } else if (piece === END) {
      if (--depth === 0 && text.length > start) spans.push([start, text.length]);
    } else {
      text += piece;
    }
  }
  return { text, spans };
}
