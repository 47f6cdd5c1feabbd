/** White space as Python's strings know it: JavaScript's own trimming takes a mark and leaves control characters. */

/** Within the brackets of a pattern. */
export const SPACES = '\\t-\\r\\x1c-\\x20\\u0085\\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000';
const [SPACE, OTHER] = [new RegExp(`[${SPACES}]`), new RegExp(`[^${SPACES}]`)];

export const isSpace = (character) => SPACE.test(character);

/** Whether a text, which may be a whole document, holds nothing but white space. */
export const isBlank = (text) => !OTHER.test(text);

/** A text without what stands at its ends, as str.strip, str.lstrip and str.rstrip. */
export function strip(text, characters = null, { left = true, right = true } = {}) {
  const all = [...text];
  const goes = characters === null ? isSpace : (each) => characters.includes(each);
  let [begin, end] = [0, all.length];
  while (left && begin < end && goes(all[begin])) begin++;
  while (right && end > begin && goes(all[end - 1])) end--;
  return all.slice(begin, end).join('');
}
