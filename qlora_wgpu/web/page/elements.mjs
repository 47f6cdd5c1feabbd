/** Texts as elements of the page. */

function element(kind, text, className = '') {
  return Object.assign(document.createElement(kind), { textContent: text, className });
}

/** The parts of a row as the model sees it, those marked that the loss is taken on. */
export function ofExample({ parts, cut }) {
  return [...parts.map(({ text, trained }) => element(trained ? 'mark' : 'span', text)), cut ? ' …' : ''];
}

/** What was said in a chat; the direction is the text's. */
export function ofTurn(text, own) {
  const turn = Object.assign(element('div', text, own ? 'turn own' : 'turn'), { dir: 'auto' });
  turn.dataset.by = own ? 'You' : 'The model'; // for those who listen; others see it by side and colour
  return turn;
}
