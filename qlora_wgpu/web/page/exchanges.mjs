/** A turn with a word in place of its content, or of what it gives a function it calls; as data/exchanges.py. */

import { isObject } from './conversations.mjs';
import { strip } from './strip.mjs';

const THOUGHTS = ['reasoning_content', 'thinking', 'reasoning'];

/**
 * A turn with a word in it, in the ways that may tell where it is. One that says nothing and calls a function has the
 * word in place of an argument at first, since templates write other things around a content than around none.
 *
 * @returns {{message: object, mayBecome: (passage: string) => boolean}[]}
 */
export function exchanges(message, word) {
  const { content } = message;
  const listed = Array.isArray(content);
  const other = { message: { ...message, content: listed ? [{ type: 'text', text: word }] : word }, mayBecome: (passage) => isKeptOf(passage, content) };
  const called = (listed ? content.length : content) ? null : inCall(message, word);
  return called ? [called, other] : [other];
}

/** The word in place of the first argument of a call that is text. */
function inCall(message, word) {
  const calls = callsOf(message);
  for (const [number, call] of calls.entries()) {
    const given = givenTo(call);
    const [key, text] = Object.entries(given).find(([, value]) => typeof value === 'string' && strip(value)) ?? [];
    if (key === undefined) continue;
    const changed = { ...(call.function ?? call), arguments: { ...given, [key]: word } };
    const own = 'function' in call ? { ...call, function: changed } : changed;
    return { message: { ...message, tool_calls: calls.with(number, own) }, mayBecome: (passage) => passage === text };
  }
  return null;
}

/** Whether a passage is a content, or what a template keeps of it. */
function isKeptOf(passage, content) {
  const text = Array.isArray(content) ? content.map((part) => part?.text ?? '').join('') : content;
  if (typeof text !== 'string') return !passage;
  return strip(passage) ? text.includes(strip(passage)) : !strip(text);
}

/** Whether a turn's thoughts and calls are within its span, as far as they are in the text once. */
export function holdsWhatIsWritten(message, text, [begin, end]) {
  return writtenIn(message).every((written) => {
    const at = text.indexOf(written);
    const isOnce = at >= 0 && !text.includes(written, at + 1);
    return !isOnce || (begin <= at && at + written.length <= end);
  });
}

function writtenIn(message) {
  const thoughts = THOUGHTS.map((key) => message[key]).filter((value) => typeof value === 'string').map((value) => strip(value));
  const given = callsOf(message).flatMap((call) => Object.values(givenTo(call))).filter((value) => typeof value === 'string');
  return [...thoughts, ...given].filter(Boolean);
}

const callsOf = ({ tool_calls: calls }) => (Array.isArray(calls) ? calls : []);

/** What a call gives its function, by name. */
function givenTo(call) {
  const called = isObject(call) ? call.function ?? call : null;
  return isObject(called) && isObject(called.arguments) ? called.arguments : {};
}
