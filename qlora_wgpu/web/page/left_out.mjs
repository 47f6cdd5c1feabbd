/** What a chat template leaves out of a conversation, as many do without a word; as data/marker_words.py. */

import { Told } from './device.mjs';
import { isSome } from './json.mjs';
import { MarkedConversation, nameOf } from './marker_words.mjs';
import { isBlank } from './strip.mjs';

const KINDS = { thought: 'thoughts', call: 'tool calls', tool: 'the tools' };
const MOST_SHAPES = 4096; // that are remembered

/** Which parts a template leaves out follows from which there are, so that of conversations of one shape one is looked at. */
export class LeftOut {
  /** @param {import('./chat.mjs').ChatTemplate} template */
  constructor(template) {
    Object.assign(this, { template, known: new Map() });
  }

  /**
   * What of a conversation is left out, in words.
   *
   * @param {{messages: object[], tools: object[]|null}} conversation
   * @param {string} text Its text.
   * @param {Set<number>} trained The numbers of the messages that the loss is taken on.
   * @returns {Set<string>}
   * @throws {Told} If nothing is left of a message that the loss is taken on.
   */
  of(conversation, text, trained) {
    const { messages, tools } = conversation;
    const shape = JSON.stringify([messages.map(shapeOf), Boolean(tools)]);
    if (!this.known.has(shape)) {
      if (this.known.size >= MOST_SHAPES) this.known.clear();
      this.known.set(shape, this._parts(conversation, text));
    }
    const { parts, leftOut } = this.known.get(shape);
    for (const number of [...trained].sort((a, b) => a - b)) {
      const own = [...parts.values()].filter(({ message }) => message === number);
      if (own.length && own.every((part) => leftOut.has(nameOf(part)))) {
        const kinds = own.map(({ kind }) => ({ thought: 'thought', call: 'tool call' })[kind] ?? 'content').sort().join(' and ');
        throw new Told(`message ${number + 1} is trained on, but the chat template omits its ${kinds}, and it has no other content: ` +
          'build the site with another data.chat_template');
      }
    }
    return new Set([...leftOut.values()].map((part) => inWords(part, messages)));
  }

  /** All parts of a conversation, and those that are left out. */
  _parts({ messages, tools }, text) {
    const marked = new MarkedConversation(text, messages, tools);
    messages.forEach((_, number) => marked.mark(number));
    marked.markTools();
    const whole = this.template.textOf(marked.messages, false, marked.tools.length ? marked.tools : null);
    if (whole === null) return { parts: new Map(), leftOut: new Map() }; // it goes by what is exchanged
    return { parts: marked.parts(), leftOut: marked.leftOut(whole) };
  }
}

/** What of a message decides which parts it has. */
function shapeOf(message) {
  const { content } = message;
  const isText = typeof content === 'string';
  const filled = Object.keys(message).filter((key) => isSome(message[key]));
  return [message.role, filled, isText && !isBlank(content), isText && content.includes('</think>')];
}

function inWords({ message, kind }, messages) {
  if (kind in KINDS) return KINDS[kind];
  const { role } = messages[message];
  return role === 'system' ? 'the system message' : `messages of the role '${role}'`;
}
