/** Which characters of a conversation are trained on: by whose turns they are, and what turns say; as data/masking.py. */

import { RenderedTurns } from './masking.mjs';
import { decides, isAskedFor, isSpared } from './turn_marks.mjs';

const isOwn = ({ role }) => role === 'assistant';

/** Whether what turns say of themselves counts, and so has to be sound. */
export const heedsMarks = (template, wanted) => wanted === 'all' || !decides(template);

/**
 * A conversation as text, the spans of what is trained on, whether turns that would be trained on say that they are not, and the
 * numbers of the assistant's turns that the loss is taken on.
 *
 * @param {import('./chat.mjs').ChatTemplate} template
 * @param {{messages: object[], tools: object[]|null, prompt: number}} conversation
 * @param {string} wanted What is trained on: train_on.
 */
export function trainedTurns(template, { messages, tools, prompt }, wanted, eosToken) {
  const isLast = wanted === 'last_turn' || (wanted === 'completion' && !prompt);
  const first = isLast ? messages.length - 1 : prompt;
  const [isWhole, heeds] = [wanted === 'all', heedsMarks(template, wanted)];
  const numbers = [...messages.keys()];
  const own = numbers.filter((i) => i >= first && isOwn(messages[i]));
  const spared = (isWhole ? numbers : own).filter((i) => isSpared(messages[i]));
  const rendered = new RenderedTurns(template, messages, tools, eosToken);
  const turns = new Set(own.filter((i) => !heeds || !spared.includes(i)));
  const { text } = rendered;
  let spans = isWhole ? without([[0, text.length]], rendered.turnsOfAnyone(spared)) : rendered.spansOf(turns);
  if (heeds && ['auto', 'assistant'].includes(wanted)) {
    const asked = numbers.filter((i) => i >= first && !isOwn(messages[i]) && isAskedFor(messages[i]));
    if (asked.length) spans = joined([...spans, ...rendered.turnsOfAnyone(asked)]);
  }
  return { text, spans, spared: spared.length > 0, turns };
}

/** Spans in any order as ascending, disjoint ones. */
function joined(spans) {
  const whole = [];
  for (const [start, end] of spans.toSorted(([a, b], [c, d]) => a - c || b - d)) {
    const last = whole.at(-1);
    if (last && start < last[1]) last[1] = Math.max(end, last[1]);
    else whole.push([start, end]);
  }
  return whole;
}

/** What is left of ascending, disjoint spans without what is in the holes. */
function without(spans, holes) {
  for (const [start, end] of holes) {
    spans = spans.flatMap(([a, b]) => [[a, Math.min(b, start)], [Math.max(a, end), b]]).filter(([a, b]) => a < b);
  }
  return spans;
}
