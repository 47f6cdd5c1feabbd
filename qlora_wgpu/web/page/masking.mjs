/** Which characters of a rendered conversation are whose turn, as data/masking.py. */

import { REASONING, textOf } from './canonical_messages.mjs';
import { USUAL_ROLES } from './conversations.mjs';
import { Told } from './device.mjs';
import { isSome } from './json.mjs';
import { commonPrefix, MarkedConversation, nameOf, unused } from './marker_words.mjs';
import { isBlank, SPACES, strip } from './strip.mjs';

const WHOLE = new RegExp(`^.*[${SPACES}>\\]]`, 's'); // up to where no special token is cut in two
const FEW_TURNS = 16;
const ASKED = { role: 'user', content: '?' };
const UNMARKED = 'in the rendered chat: build the site with a chat template that has {% generation %} blocks (data.chat_template)';
const ANOTHER = 'in the rendered chat: build the site with another chat template (data.chat_template)';
const bareEnd = (text) => strip(text, null, { left: false });
const withoutEnd = (text, end) => (end && text.endsWith(end) ? text.slice(0, -end.length) : text);

/**
 * A rendered conversation, and which of its characters are whose turn.
 *
 * A turn of the assistant includes what the template writes after it, up to the next turn. If the template marks its text,
 * the marks decide. If not, each turn lies between two renderings that both begin the whole text, where there are such; else
 * it is found by marker words in what it says, and may be in several pieces.
 */
export class RenderedTurns {
  /**
   * @param {import('./chat.mjs').ChatTemplate} template
   * @param {object[]} messages
   * @param {object[]|null} tools
   * @param {string|null} eosToken Text that some templates put after the very last turn only.
   * @throws {Told} If the template refuses the conversation.
   */
  constructor(template, messages, tools, eosToken) {
    const { text, spans } = template.render(messages, false, tools);
    Object.assign(this, { text, template, messages, tools, eosToken: eosToken ?? '', marked: spans, known: new Map(), allMarked: null });
  }

  /** The spans of some of the assistant's turns, ascending. */
  spansOf(turns) {
    if (this.marked) return this._markedOf(turns);
    const found = this._spans([...turns].sort((a, b) => a - b));
    const flat = [...found].flatMap(([turn, spans]) => {
      if (!spans.length) throw new Told(`cannot locate the assistant's turn in message ${turn + 1} ${UNMARKED}`);
      return spans.map((span) => ({ span, turn }));
    }).sort(({ span: a }, { span: b }) => a[0] - b[0] || a[1] - b[1]);
    flat.forEach(({ span, turn }, i) => {
      if (i && span[0] < flat[i - 1].span[1]) throw new Told(`the assistant's turn in message ${turn + 1} overlaps another one ${UNMARKED}`);
    });
    return flat.map(({ span }) => span);
  }

  /**
   * The spans of turns, whoever they are from. A turn of another than the assistant is what it says, and what the template
   * writes after it, where that can be told. One that a template is free to leave out is none.
   */
  turnsOfAnyone(turns) {
    return [...this._spans(turns)].flatMap(([turn, spans]) => {
      if (!spans.length && !this._mayBeLeftOut(turn)) {
        throw new Told(`cannot locate the turn in message ${turn + 1}, which has a flag such as train, ${ANOTHER}`);
      }
      return spans;
    });
  }

  /** Whether a template may leave a message out, and has. */
  _mayBeLeftOut(turn) {
    const { role } = this.messages[turn];
    if (role !== 'system' && USUAL_ROLES.includes(role)) return false;
    const { marked } = this._allMarked();
    const whole = this._render(marked.messages);
    return whole !== null && marked.leftOut(whole).has(nameOf({ message: turn, kind: 'content' }));
  }

  _own() {
    return [...this.messages.keys()].filter((i) => this._isOwn(i));
  }

  _isOwn(turn) {
    return this.messages[turn].role === 'assistant';
  }

  // Where the template marks them.

  /**
   * What the template marks of turns. Nothing at its marks says whose turn they are in, and there may be several in one: a
   * span belongs to whose words are in it, or else to the turn that has begun before it.
   */
  _markedOf(turns) {
    const own = this._own();
    if (own.length === turns.size) return this.marked;
    if (!turns.size) return [];
    return this.marked.filter((span) => {
      const owners = this._owners(span, own);
      const isOne = new Set(owners.map((owner) => turns.has(owner))).size === 1;
      if (!isOne) {
        const which = turns.size === 1 && turns.has(own.at(-1)) ? 'last turn' : 'turns';
        throw new Told(`cannot locate the assistant's ${which} in the rendered chat: build the site with ` +
          'data.train_on set to assistant, or with another chat template (data.chat_template)');
      }
      return turns.has(owners[0]);
    });
  }

  /** The assistant's turns to which a marked span may belong. */
  _owners([begin, end], own) {
    const within = own.filter((turn) => this._placesOf(turn).some((place) => place.start < end && place.end > begin));
    if (within.length) return within;
    const numbers = [...this.messages.keys()];
    const last = numbers.findLast((i) => this._placesOf(i).some((place) => place.end <= begin)) ?? -1;
    const until = numbers.find((i) => i > last && this._placesOf(i).length) ?? numbers.length;
    // Those that say nothing, before whoever speaks next, and the one that has spoken.
    const near = own.filter((turn) => last <= turn && turn < until);
    return near.length ? near : own.filter((turn) => turn >= last);
  }

  // Where it does not.

  /** The text, or null where the template refuses this part of the conversation. */
  _render(messages, prompt = false) {
    return messages.length ? this.template.textOf(messages, prompt, this.tools) : null;
  }

  /** The conversation with words exchanged, and where the text has what these stand for. */
  _exchanged(mark) {
    const marked = new MarkedConversation(this.text, this.messages);
    mark(marked);
    return { marked, places: marked.marks.length ? marked.places(this._render(marked.messages)) : new Map() };
  }

  _allMarked() {
    this.allMarked ??= this._exchanged((marked) => this.messages.forEach((_, number) => marked.mark(number)));
    return this.allMarked;
  }

  /**
   * The conversation with words exchanged, in the ways that may tell where a turn is. The text is another one where a template
   * goes by what is exchanged: by another turn, or by this one's content.
   */
  * _ways(turn) {
    yield this._allMarked();
    yield this._exchanged((marked) => marked.mark(turn));
    yield this._exchanged((marked) => marked.markContent(turn, textOf(this.messages[turn].content)));
  }

  /** Where the text has what a turn says; nothing where that is not known. */
  _placesOf(turn) {
    if (!this.known.has(turn)) this.known.set(turn, firstOf(this._ways(turn), (way) => way.places.get(turn) ?? []));
    return this.known.get(turn);
  }

  /**
   * The spans of turns by the numbers of their messages; none where one cannot be told.
   *
   * Finding a turn takes time with the whole conversation. In a long one, turns around which the template writes the same are
   * begun and ended alike: a few of each kind are found, and where these agree, the others are theirs.
   */
  _spans(turns) {
    if (turns.length <= FEW_TURNS) return new Map(turns.map((turn) => [turn, this._span(turn)]));
    const spans = new Map(this._kinds(turns).flatMap((kind) => this._spansOfAKind(kind)));
    return new Map(turns.map((turn) => [turn, spans.get(turn)]));
  }

  _spansOfAKind(turns) {
    const tried = [turns[0], turns[Math.floor(turns.length / 2)], turns.at(-1)];
    const samples = new Map(tried.map((turn) => [turn, this._span(turn)]));
    const { places } = this._allMarked();
    const margins = [...samples].map(([turn, spans]) => {
      const own = places.get(turn); // of a turn of one piece it is known how far it reaches beyond what it says
      return own && spans.length === 1 ? [own[0].start - spans[0][0], spans[0][1] - own.at(-1).end] : null;
    });
    const [margin] = margins;
    const isOne = margin && margins.every((each) => each && each[0] === margin[0] && each[1] === margin[1]);
    return turns.map((turn) => {
      if (isOne) return [turn, [[places.get(turn)[0].start - margin[0], places.get(turn).at(-1).end + margin[1]]]];
      const sample = samples.get(turn) ?? [];
      return [turn, sample.length ? sample : this._span(turn)];
    });
  }

  /** Turns of a role around which the template writes the same; others by themselves. */
  _kinds(turns) {
    const ordered = [...this._allMarked().places].flatMap(([turn, places]) => places.map(({ start, end }) => ({ start, end, turn })));
    ordered.sort((a, b) => a.start - b.start || a.end - b.end || a.turn - b.turn);
    const [begins, ends] = [new Map(), new Map()];
    let before = { end: 0, turn: -1 };
    for (const after of ordered) {
      const between = this.text.slice(before.end, after.start);
      if (!begins.has(after.turn)) begins.set(after.turn, between);
      ends.set(before.turn, between);
      before = after;
    }
    const kinds = new Map();
    for (const turn of turns) {
      const isKnown = begins.has(turn) && ends.has(turn);
      const kind = isKnown ? JSON.stringify([this.messages[turn].role, begins.get(turn), ends.get(turn)]) : turn;
      if (!kinds.has(kind)) kinds.set(kind, []);
      kinds.get(kind).push(turn);
    }
    return [...kinds.values()];
  }

  /** A turn, in as many pieces as others stand between; none where it cannot be told. */
  _span(turn) {
    const message = this.messages[turn];
    const span = this._isOwn(turn) ? this._byPrefix(turn) : null;
    if (span) {
      const saysMore = ['tool_calls', ...REASONING].some((key) => isSome(message[key] ?? null));
      const places = saysMore ? this._allMarked().places.get(turn) ?? [] : [];
      if (places.every(({ start, end }) => span[0] <= start && end <= span[1])) return [span];
    }
    return firstOf(this._ways(turn), (way) => this._around(turn, way));
  }

  /** The turn between two renderings that both begin the whole text. */
  _byPrefix(turn) {
    const before = this._render(this.messages.slice(0, turn), true);
    const through = turn + 1 === this.messages.length ? this.text : this._render(this.messages.slice(0, turn + 1));
    if (before === null || through === null || through.length <= before.length) return null;
    return this.text.startsWith(through) && through.startsWith(before) ? [before.length, through.length] : null;
  }

  /** A turn around the places of what it says. */
  _around(turn, way) {
    const own = way.places.get(turn);
    const end = own ? this._end(turn, way, own.at(-1)) : null;
    if (end === null) return [];
    const others = [...way.places].filter(([other]) => other !== turn).flatMap(([, places]) => places.map(({ start }) => start));
    const spans = [];
    let begin = this._start(turn, own[0].start);
    own.slice(1).forEach((after, i) => {
      if (!others.some((start) => own[i].end <= start && start < after.start)) return;
      spans.push([begin, this._endOfPiece(turn, way, own[i])]);
      begin = after.start;
    });
    return [...spans, [begin, end]];
  }

  /**
   * Where a turn begins of which the first that it says stands at a place. What the template writes between its prompt and
   * the content is the turn's. Where the prompt goes on otherwise than the turn does (with an empty thought), it ends where
   * both, and a turn of a single word, part.
   */
  _start(turn, at) {
    if (!this._isOwn(turn)) return at;
    const [head, earlier] = [this.text.slice(0, at), this.messages.slice(0, turn)];
    const [before, plain] = [this._render(earlier, true), this._render(earlier)];
    if (before !== null && head.startsWith(before)) return before.length;
    const alone = this._render([...earlier, { role: 'assistant', content: unused(this.text) }]);
    if (before !== null && alone !== null && plain !== null && head.startsWith(plain)) {
      const begin = Math.min(commonPrefix(before, head), commonPrefix(alone, head));
      const header = WHOLE.exec(head.slice(plain.length, begin));
      if (header) return plain.length + header[0].length;
    }
    return this._behindHeader(at);
  }

  /** Where a turn begins behind the header of any, if that stands before a place. */
  _behindHeader(at) {
    const [plain, before] = [this._render([ASKED]), this._render([ASKED], true)];
    if (plain === null || before === null || !before.startsWith(plain)) return at;
    const header = before.slice(plain.length);
    const ends = [...this._allMarked().places.values()].flat().map(({ end }) => end).filter((end) => end <= at);
    const said = Math.max(0, ...ends);
    const begin = isBlank(header) ? -1 : this.text.slice(said, at).lastIndexOf(header);
    return begin < 0 ? at : said + begin + header.length;
  }

  /** Where a piece of a turn ends: what is written after it without what stands between. */
  _endOfPiece(turn, way, place) {
    const cut = after(way, place, this._render(way.marked.messages.slice(0, turn + 1)));
    return place.behind + commonPrefix(this.text.slice(place.behind), cut ?? '');
  }

  /** Where a turn ends of which a place is the last that it says; null where that is not certain. */
  _end(turn, way, place) {
    const tail = this.text.slice(place.behind);
    const { messages } = way.marked;
    for (const earlier of [messages.slice(0, turn), [ASKED]]) { // some refuse an answer to nothing
      const closing = this._closing(earlier, messages[turn], way, place, tail);
      if (closing !== null) return place.behind + closing.length;
    }
    if (!this._isOwn(turn)) return place.end; // such as a system message within a turn of the user
    let next = { start: Infinity, turn };
    for (const [other, places] of way.places) {
      for (const { start } of places) {
        if (start >= place.end && (start < next.start || (start === next.start && other < next.turn))) next = { start, turn: other };
      }
    }
    return next.turn !== turn && this._isOwn(next.turn) ? place.end : null; // an answer that goes on
  }

  /** What the template writes after a turn, where the tail begins so. */
  _closing(earlier, message, way, place, tail) {
    const ending = after(way, place, this._render([...earlier, message]));
    if (ending === null) return null;
    // Some templates close the whole text once more, or in white space, after the last turn.
    const bare = withoutEnd(ending, this.eosToken);
    const found = [ending, bare, bareEnd(ending), bareEnd(bare)].find((each) => tail.startsWith(each));
    if (found !== undefined) return found;
    // Others close the last turn in a way of its own, unless another is to follow (gpt-oss).
    const followed = after(way, place, this._render([...earlier, message], true));
    const [before, plain] = [this._render(earlier, true), this._render(earlier)];
    if (followed === null || before === null || plain === null || !before.startsWith(plain)) return null;
    const prompt = before.slice(plain.length);
    if (!prompt || !followed.endsWith(prompt)) return null;
    const closing = withoutEnd(followed, prompt);
    return closing && tail.startsWith(closing) ? closing : null;
  }
}

/** What a text of exchanged messages has after the word that stands at a place; null where it has none. */
function after({ marked }, place, text) {
  const found = text === null ? undefined : marked.found(text).find(({ number }) => number === place.number);
  return found ? text.slice(found.end) : null;
}

/** What the first way gives that gives anything. */
function firstOf(ways, given) {
  for (const way of ways) {
    const found = given(way);
    if (found.length) return found;
  }
  return [];
}
