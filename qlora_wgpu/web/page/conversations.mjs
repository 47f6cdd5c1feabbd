/** What a row holds: its format by its keys, and the messages of a conversation, as data/messages.py. */

import { canonicalMessage, canonicalOptions, canonicalTools, EmptyRow, fromJson, kindOf, parsedAs, textOf } from './canonical_messages.mjs';
import { Told } from './device.mjs';
import { isObject, isSome } from './json.mjs';
import { isBlank, strip } from './strip.mjs';
import { checkMarks, isMark, marksOf } from './turn_marks.mjs';

/** The keys that make a format, in order of precedence. */
export const FORMATS = {
  messages: ['messages'],
  conversations: ['conversations'],
  'prompt/completion': ['prompt', 'completion'],
  'instruction/output': ['instruction', 'output'],
  text: ['text'],
};
/** Names that data sets give to columns of these formats, as data/columns.py has them. */
const USUAL_NAMES = {
  messages: 'conversation dialog dialogue chat turns',
  prompt: 'question query input user problem request instruction context source',
  completion: 'answer response output reply solution target assistant chosen',
  output: 'response answer completion reply',
  text: 'content body document article story passage',
};
const ROLES = {
  __proto__: null, // which would know a 'constructor'
  human: 'user', user: 'user', gpt: 'assistant', assistant: 'assistant', chatgpt: 'assistant', model: 'assistant',
  bing: 'assistant', bard: 'assistant', system: 'system', tool: 'tool', function: 'tool', observation: 'tool',
};
/** What chat templates know; there are more, which one or another does. */
export const USUAL_ROLES = ['system', 'developer', 'user', 'assistant', 'tool', 'function', 'ipython'];
const SYSTEMS = ['system', 'developer']; // roles of a message that stands in place of a row's own
const CALL = 'function_call';
const MOST_MESSAGES = 4096; // of a conversation
const SHOWN = 40; // characters of a key in a message

const PAIR = 'prompt/completion';
/** Of lists of messages, as TRL has them. */
export const CHAT_PAIR = 'conversational prompt/completion';
/** Formats that a chat template writes. */
export const CHATS = ['messages', 'conversations', CHAT_PAIR];

/** The keys that make a format. */
export const keysOf = (format) => FORMATS[format === CHAT_PAIR ? PAIR : format];

/** The format of a row by its keys; one that columns are named for goes before others. */
export function formatOf(row, wanted = 'auto', columns = {}) {
  const keys = Object.keys(row);
  const filled = keys.filter((key) => row[key] !== null);
  const isMeant = ([, needed]) => needed.some((key) => key in columns);
  const formats = Object.entries(FORMATS).sort((a, b) => isMeant(b) - isMeant(a));
  for (const present of [filled, keys]) {
    for (const [name, needed] of formats) {
      if ((wanted === 'auto' || wanted === name) && needed.every((key) => present.includes(key))) {
        return name === PAIR && Array.isArray(row.prompt) ? CHAT_PAIR : name;
      }
    }
  }
  const open = wanted === 'auto' ? Object.values(FORMATS) : [FORMATS[wanted]];
  const needs = open.map((needed) => needed.map(quoted).join(' and ')).join('; or ');
  throw new Told(`a row must have ${needs}; its keys are ${keys.slice(0, 8).map(quoted).join(', ') || 'none'}${hintOf(row, open)}`);
}

const quoted = (key) => `'${key.length > SHOWN ? `${key.slice(0, SHOWN)}…` : key}'`;

/** Which columns are to be renamed where they are likely those of a format. */
function hintOf(row, formats) {
  for (const needed of formats) {
    const columns = needed.map((key) => [columnFor(key, row), key]);
    if (columns.every(([column]) => column !== undefined)) {
      const renamed = columns.filter(([column, key]) => column !== key);
      return `: rename ${renamed.map(([column, key]) => `${quoted(column)} to '${key}'`).join(' and ')}`;
    }
  }
  return hintOfList(row);
}

/** What to do where an object has its rows in a list. */
export function hintOfList(value) {
  const list = isObject(value) && Object.keys(value).find((key) => Array.isArray(value[key]) && isObject(value[key][0]));
  return list ? `: if ${quoted(list)} has the rows, save only that list as a .json file` : '';
}

function columnFor(key, row) {
  const columns = Object.keys(row);
  const [kind, names] = [key === 'messages' ? Array.isArray : (value) => typeof value === 'string', USUAL_NAMES[key]?.split(' ') ?? []];
  return [key, ...columns.filter((column) => strip(column).toLowerCase() === key), ...names.filter((name) => columns.includes(name) && kind(row[name]))]
    .find((name) => columns.includes(name));
}

/**
 * Messages, tools and the template's options of a row of a chat format, and how many messages are its prompt; what messages
 * say of themselves may be checked.
 */
export function conversationOf(key, row, checks = false) {
  const turns = key === CHAT_PAIR ? null : fromJson(row[key]);
  const first = Array.isArray(turns) && isObject(turns[0]) ? turns[0] : {};
  let messages;
  let [prompt, name] = [0, 'message'];
  if (key === CHAT_PAIR) {
    const parts = ['prompt', 'completion'].map((each) => messagesOf(each, row[each], checks));
    messages = parts.flat();
    prompt = parts[0].length;
    if (!messages.length) throw new EmptyRow("'prompt' and 'completion' have no messages");
  } else if ('role' in first || (key === 'messages' && !('from' in first))) {
    messages = checkedMessages(turns, key);
  } else {
    [messages, name] = [fromShareGPT(turns), 'turn'];
  }
  if (checks && key !== CHAT_PAIR) messages.forEach((message, index) => checkMarks(message, `${name} ${index + 1}`));
  if (!messages.some(saysAnything)) throw new EmptyRow('the messages have no text');
  if (typeof row.system === 'string' && !isBlank(row.system) && !SYSTEMS.includes(messages[0].role)) {
    messages = [{ role: 'system', content: row.system }, ...messages];
    if (key === CHAT_PAIR) prompt++;
  }
  return { messages, tools: canonicalTools(row.tools), options: canonicalOptions(row.chat_template_kwargs), prompt };
}

function messagesOf(key, value, checks) {
  if (!Array.isArray(value)) throw new Told(`'${key}' must be a list of messages, like the other of 'prompt' and 'completion'`);
  const messages = value.length ? checkedMessages(value, key) : [];
  if (checks) messages.forEach((message, index) => checkMarks(message, `message ${index + 1} of '${key}'`));
  return messages;
}

function checkedMessages(value, key) {
  const messages = listOf(value, `'${key}' must be a non-empty list of messages`);
  return messages.map((message, index) => canonicalMessage(message, `message ${index + 1}`));
}

function fromShareGPT(turns) {
  return listOf(turns, "'conversations' must be a non-empty list of turns").map((turn, index) => {
    const number = index + 1;
    if (!isObject(turn) || !('from' in turn) || !('value' in turn)) throw new Told(`turn ${number} must have 'from' and 'value'`);
    const role = ROLES[String(turn.from).toLowerCase()];
    if (!role && turn.from !== CALL) throw new Told(`turn ${number}: unknown 'from' '${turn.from}' (supported: ${[...Object.keys(ROLES), CALL].sort().join(', ')})`);
    const { value } = turn;
    if (value !== null && typeof value !== 'string') throw new Told(`turn ${number}: 'value' must be text, got ${kindOf(value)}`);
    const isSaid = role || value === null;
    const said = isSaid ? { role: role ?? 'assistant', content: value } : { role: 'assistant', content: '', tool_calls: toolCalls(value, number) };
    return canonicalMessage({ ...said, ...marksOf(turn) }, `turn ${number}`);
  });
}

function toolCalls(text, number) {
  const value = parsedAs(text, `turn ${number} is from '${CALL}', but its value is`);
  const calls = Array.isArray(value) ? value : [value];
  if (!calls.length || !calls.every((call) => isObject(call) && 'name' in call)) {
    throw new Told(`turn ${number} is from '${CALL}': its value must be JSON with 'name' and 'arguments'`);
  }
  return calls.map((call) => ({ type: 'function', function: call }));
}

function listOf(value, requirement) {
  if ((value ?? null) === null || value === '' || (Array.isArray(value) && !value.length)) throw new EmptyRow(requirement);
  if (!Array.isArray(value)) throw new Told(requirement);
  if (value.length > MOST_MESSAGES) throw new Told(`it has ${value.length.toLocaleString('en')} messages, more than ${MOST_MESSAGES.toLocaleString('en')}`);
  return value;
}

/** Whether a message has more than its role, white space and whether it is trained on. */
function saysAnything(message) {
  const others = Object.entries(message).some(([key, value]) => key !== 'role' && key !== 'content' && !isMark(key) && isSome(value));
  return others || !isBlank(textOf(message.content));
}
