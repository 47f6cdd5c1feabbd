/** Which characters of a rendered conversation the assistant wrote, as data/masking.py. */

import { Told } from './device.mjs';
import { exchanges, holdsWhatIsWritten } from './exchanges.mjs';
import { strip } from './strip.mjs';

const WHOLE = /^.*[\s>\]]/s; // up to where no special token is cut in two
const UNKNOWN = 'cannot be told apart in the rendered chat: write the site with a chat template that has ' +
  '{% generation %} blocks (data.chat_template)';

/**
 * Renders a conversation and finds the assistant's turns in it.
 *
 * @param {import('./chat.mjs').ChatTemplate} template
 * @returns {{text: string, spans: [number, number][]}}
 */
export function assistantSpans(template, messages, tools, eosToken) {
  const { text, spans: marked } = template.render(messages, false, tools);
  if (marked) return { text, spans: marked };
  const finder = new TurnFinder(template, messages, tools, text, eosToken ?? '');
  const spans = [];
  messages.forEach((message, index) => {
    if (message.role !== 'assistant') return;
    const span = finder.span(index);
    if (!span || (spans.length && span[0] < spans.at(-1)[1])) {
      throw new Told(`the assistant's turn in message ${index + 1} ${UNKNOWN}`);
    }
    spans.push(span);
  });
  return { text, spans };
}

/** The same for the assistant's last turn alone, the last message: none where it has not spoken last. */
export function lastTurnSpans(template, messages, tools, eosToken) {
  return spansFrom(messages.length - 1, template, messages, tools, eosToken);
}

/** The same for its turns from a message on. */
export function spansFrom(first, template, messages, tools, eosToken) {
  const { text, spans } = assistantSpans(template, messages, tools, eosToken);
  const speaks = (message) => message.role === 'assistant';
  if (!messages.slice(first).some(speaks)) return { text, spans: [] };
  const earlier = messages.slice(0, first).filter(speaks).length;
  if (!template.marks) return { text, spans: spans.slice(earlier) };
  if (!earlier) return { text, spans };
  const begin = endByOmission(template, messages, first, tools, text, spans) ?? endByExchange(template, messages, first, tools, text);
  if (begin === null) throw new Told(`the assistant's turns from message ${first + 1} on ${UNKNOWN}`);
  return { text, spans: spans.filter(([, end]) => end > begin) };
}

/** Turns in a rendered conversation, by their messages' numbers, whoever they are from. */
export function turnsOfAnyone(template, messages, tools, eosToken, text, numbers) {
  const finder = new TurnFinder(template, messages, tools, text, eosToken ?? '');
  return numbers.map((index) => {
    const span = finder.span(index);
    if (span) return span;
    throw new Told(`the turn in message ${index + 1}, which says of itself whether it is learnt, cannot be told apart ` +
      'in the rendered chat: write the site with another chat template (data.chat_template)');
  });
}

/** Where what is marked of earlier turns has ended and that of a turn has not begun; null where that is not certain. */
export function beginOfTurn(template, messages, turn, tools, text, spans) {
  const begin = endByOmission(template, messages, turn, tools, text, spans);
  if (begin !== null || messages[turn - 1].role === 'assistant') return begin;
  return endByExchange(template, messages, turn, tools, text);
}

/** Where the text begins to differ from that of the messages before; null where earlier turns differ, too. */
function endByOmission(template, messages, first, tools, text, spans) {
  const without = rendered(template, messages.slice(0, first), false, tools);
  if (!without) return null;
  const begin = commonPrefix(without.text, text);
  const earlier = without.spans ?? [];
  const same = earlier.every(([from, end], i) => spans[i] && spans[i][0] === from && spans[i][1] === end && end <= begin);
  return same ? begin : null;
}

/** Where the content of the message before the first one ends. */
function endByExchange(template, messages, first, tools, text) {
  const sentinel = unused(text);
  const whole = rendered(template, withContent(messages, first - 1, sentinel), false, tools);
  if (!whole || count(whole.text, sentinel) !== 1) return null;
  const tail = whole.text.split(sentinel)[1];
  return text.endsWith(tail) ? text.length - tail.length : null;
}

class TurnFinder {
  constructor(template, messages, tools, text, eosToken) {
    Object.assign(this, { template, messages, tools, text, eosToken });
  }

  _text(messages, prompt = false) {
    if (!messages.length) return null;
    return rendered(this.template, messages, prompt, this.tools)?.text ?? null;
  }

  _isOwn(index) {
    return this.messages[index].role === 'assistant';
  }

  /** A turn; null where it cannot be told, or what is written in it stands elsewhere. */
  span(index) {
    const span = (this._isOwn(index) ? this.byPrefix(index) : null) ?? this.byExchange(index);
    return span && holdsWhatIsWritten(this.messages[index], this.text, span) ? span : null;
  }

  /** The turn between two renderings that both begin the whole text. */
  byPrefix(index) {
    const before = this._text(this.messages.slice(0, index), true);
    const through = index + 1 === this.messages.length ? this.text : this._text(this.messages.slice(0, index + 1));
    if (before === null || through === null || through.length <= before.length) return null;
    return this.text.startsWith(through) && through.startsWith(before) ? [before.length, through.length] : null;
  }

  /** The turn as what changes in the text when its content does, or what a call is given. */
  byExchange(index) {
    const sentinel = unused(this.text);
    for (const turn of exchanges(this.messages[index], sentinel)) {
      const span = this._by(turn, index, sentinel);
      if (span) return span;
    }
    return null;
  }

  _by(turn, index, sentinel) {
    const exchanged = this.messages.with(index, turn.message);
    const whole = this._text(exchanged);
    if (whole === null || count(whole, sentinel) !== 1) return null;
    const [head, tail] = whole.split(sentinel);
    const end = this.text.length - tail.length;
    if (!this.text.startsWith(head) || !this.text.endsWith(tail) || end < head.length) return null;
    if (!turn.mayBecome(this.text.slice(head.length, end))) return null;
    const known = this._ending(exchanged.slice(0, index + 1), sentinel, tail, index);
    const ending = known ?? (this._isOwn(index) ? null : 0); // none of a system message within a turn of the user
    return ending === null ? null : [this._start(index, head), end + ending];
  }

  /**
   * Where a turn begins whose content, or the like, stands behind a head. What the template writes between its prompt
   * and the content is the turn's. Where the prompt goes on otherwise than the turn does (with an empty thought), it
   * ends where both, and a turn of a single word, part.
   */
  _start(index, head) {
    const earlier = this.messages.slice(0, index);
    const before = this._text(earlier, true);
    if (before === null || !this._isOwn(index)) return head.length;
    if (head.startsWith(before)) return before.length;
    const plain = this._text(earlier);
    const alone = this._text([...earlier, { role: 'assistant', content: unused(this.text) }]);
    if (plain === null || alone === null || !head.startsWith(plain)) return head.length;
    const begin = Math.min(commonPrefix(before, head), commonPrefix(alone, head));
    const header = WHOLE.exec(head.slice(plain.length, begin));
    return header ? plain.length + header[0].length : head.length;
  }

  /** How many characters of the tail close the turn. */
  _ending(exchanged, sentinel, tail, index) {
    const cut = this._text(exchanged);
    if (cut === null || count(cut, sentinel) !== 1) return null;
    const ending = cut.split(sentinel)[1];
    // Some templates close the whole text once more, or in white space, after the last turn.
    const bare = this.eosToken ? withoutEnd(ending, this.eosToken) : ending;
    const found = [ending, bare, bareEnd(ending), bareEnd(bare)].find((each) => tail.startsWith(each));
    return found === undefined ? this._endingBefore(exchanged, sentinel, tail, index) : found.length;
  }

  /** The same where the last turn is closed in a way of its own, unless another is to follow (gpt-oss). */
  _endingBefore(exchanged, sentinel, tail, index) {
    const earlier = this.messages.slice(0, index);
    const [followed, before, plain] = [this._text(exchanged, true), this._text(earlier, true), this._text(earlier)];
    if (followed === null || before === null || plain === null || !before.startsWith(plain)) return null;
    const prompt = before.slice(plain.length);
    if (!prompt || !followed.endsWith(prompt)) return null;
    const closing = withoutEnd(followed.split(sentinel).at(-1), prompt);
    return closing && tail.startsWith(closing) ? closing.length : null;
  }
}

function rendered(template, messages, prompt, tools) {
  try {
    return template.render(messages, prompt, tools);
  } catch (error) {
    if (error instanceof Told) return null;
    throw error;
  }
}

function withContent(messages, index, text) {
  const message = messages[index];
  const content = Array.isArray(message.content) ? [{ type: 'text', text }] : text;
  return [...messages.slice(0, index), { ...message, content }, ...messages.slice(index + 1)];
}

/** The number of characters that two texts begin with alike. */
function commonPrefix(a, b) {
  const most = Math.min(a.length, b.length);
  let at = 0;
  while (at < most && a[at] === b[at]) at++;
  return at;
}

const withoutEnd = (text, end) => (text.endsWith(end) ? text.slice(0, -end.length) : text);
const bareEnd = (text) => strip(text, null, { left: false });
const count = (text, word) => text.split(word).length - 1;

/** A word that a text does not hold. */
function unused(text) {
  for (let number = 0; ; number++) {
    const word = `Qsentinel${number}z`;
    if (!text.includes(word)) return word;
  }
}
