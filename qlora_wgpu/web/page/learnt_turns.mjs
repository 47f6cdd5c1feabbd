/** Which characters of a conversation are learnt: by whose turns they are, and what turns say; as data/learnt_turns.py. */

import { isLeftOut } from './conversations.mjs';
import { Told } from './device.mjs';
import { assistantSpans, beginOfTurn, lastTurnSpans, spansFrom, turnsOfAnyone } from './masking.mjs';
import { decides, isAskedFor, isSpared } from './turn_marks.mjs';

const isOwn = ({ role }) => role === 'assistant';

/** Whether what turns say of themselves counts, and so has to be sound. */
export const heedsMarks = (template, wanted) => wanted === 'all' || !decides(template);

/**
 * A conversation as text, the spans of what is learnt, and whether turns that would be learnt say that they are not.
 *
 * @param {import('./chat.mjs').ChatTemplate} template
 * @param {{messages: object[], tools: object[]|null, prompt: number}} conversation
 * @param {string} wanted What is learnt: train_on.
 */
export function learntTurns(template, { messages, tools, prompt }, wanted, eosToken) {
  const isLast = wanted === 'last_turn' || (wanted === 'completion' && !prompt);
  const first = isLast ? messages.length - 1 : prompt;
  const isWhole = wanted === 'all';
  const spared = [...messages.keys()].filter((i) => isSpared(messages[i]) && (isWhole || (i >= first && isOwn(messages[i]))));
  const given = [template, messages, tools, eosToken];
  const shown = (text, numbers) => turnsOfAnyone(...given, text, numbers.filter((i) => !isLeftOut(messages[i], text)));
  if (isWhole) {
    const { text } = template.render(messages, false, tools);
    return { text, spans: without([[0, text.length]], shown(text, spared)), spared: spared.length > 0 };
  }
  let found;
  if (isLast) found = lastTurnSpans(...given);
  else found = first ? spansFrom(first, ...given) : assistantSpans(...given);
  let { text, spans } = found;
  if (heedsMarks(template, wanted)) {
    if (spared.length) spans = leftOf(new Set(spared), first, given, text, spans);
    if (['auto', 'assistant'].includes(wanted)) {
      const asked = [...messages.keys()].filter((i) => i >= first && !isOwn(messages[i]) && isAskedFor(messages[i]));
      if (asked.length) spans = joined([...spans, ...shown(text, asked)]);
    }
  }
  return { text, spans, spared: spared.length > 0 };
}

/** The assistant's spans without those of some turns, which are told from others by where the first of each begins. */
function leftOf(spared, first, given, text, spans) {
  const [template, messages, tools] = given;
  const turns = [...messages.keys()].filter((i) => i >= first && isOwn(messages[i]));
  if (!template.marks) return spans.filter((_, i) => !spared.has(turns[i]));
  const every = assistantSpans(...given).spans;
  const runs = turns.filter((turn, i) => !i || spared.has(turn) !== spared.has(turns[i - 1]));
  const begins = runs.map((turn, i) => {
    const begin = i ? beginOfTurn(template, messages, turn, tools, text, every) : 0;
    if (begin !== null) return begin;
    throw new Told(`message ${turn + 1} is to be learnt or not otherwise than the turn before it, and they cannot be told apart ` +
      'in the rendered chat: write the site with another chat template (data.chat_template)');
  });
  const isKept = (end) => runs.some((turn, i) => !spared.has(turn) && begins[i] < end && end <= (begins[i + 1] ?? text.length));
  return spans.filter(([, end]) => isKept(end));
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
