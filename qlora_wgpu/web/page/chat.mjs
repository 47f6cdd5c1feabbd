/** Chat templates: from messages to the text a model was trained on, as data/chat.py. */

import { Template } from './vendor/jinja.mjs';
import { Told } from './device.mjs';
import { OddNumber, REORDERED } from './json.mjs';
import './python_jinja.mjs';

const [START, END] = ['\ufdd0', '\ufdd1']; // around what the assistant writes
const NUMBER = `${START}\ufdd2${END}`; // in place of a number that Python writes in its own way
const GENERATION = /\{%([-+]?)\s*(generation|endgeneration)\s*([-+]?)%\}/g;
const REASONING = ['reasoning_content', 'thinking', 'reasoning'];

export class ChatTemplate {
  /**
   * @param {string} source Jinja.
   * @param {Record<string, string>} specialTokens Texts by name, such as bos_token.
   */
  constructor(source, specialTokens) {
    this.source = source;
    this.specialTokens = specialTokens;
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

  /**
   * @param {object[]} messages
   * @param {boolean} prompt Whether it ends with the header of an assistant's turn.
   * @param {object[]|null} tools
   * @returns {{text: string, spans: [number, number][]|null}} The spans of what the assistant writes, if they are marked.
   * @throws {Told} If the template refuses the conversation.
   */
  render(messages, prompt = false, tools = null) {
    let marked;
    const given = { messages: messages.map(plainMessage), tools: plain(tools), add_generation_prompt: prompt };
    try {
      marked = this.template.render({ ...this.specialTokens, ...given });
    } catch (error) {
      throw new Told(`the chat template cannot render this conversation: ${error.message}`);
    }
    if (marked.includes(NUMBER)) {
      throw new Told('the chat template writes a number out that Python writes in its own way, such as 1.0 or one beyond 2^53: write it as text');
    }
    const { text, spans } = takeMarks(marked);
    return { text, spans: this.marks ? spans : null };
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
    if (value[REORDERED]) throw new Told(`the keys ${Object.keys(value).slice(0, 4).join(', ')} of an object would get another order in the browser: begin them with a letter`);
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
