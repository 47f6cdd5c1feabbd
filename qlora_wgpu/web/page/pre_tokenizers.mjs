/** Where the library cuts texts into words otherwise than the one in Rust does, which knows more of Unicode. */

const BYTE_LEVEL = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;
const WORD = '\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\u200c\\u200d';
const WHITESPACE = new RegExp(`[${WORD}]+|[^${WORD}\\p{White_Space}]+`, 'gu');

/**
 * Mends a pre-tokenizer in place.
 *
 * @param {object|null} made The library's.
 * @param {object|null} config Its part of tokenizer.json.
 */
export function mend(made, config) {
  if (!made) return;
  if (config.type === 'Sequence') {
    config.pretokenizers.forEach((each, i) => mend(made.tokenizers[i], each));
  } else if (config.type === 'ByteLevel') {
    made.pattern = BYTE_LEVEL;
  } else if (config.type === 'Digits') {
    made.pattern = new RegExp(`[^\\p{N}]+|\\p{N}${config.individual_digits ? '' : '+'}`, 'gu');
  } else if (config.type === 'Whitespace') {
    made.pre_tokenize_text = (text) => text.match(WHITESPACE) ?? [];
  } else if (config.type === 'Metaspace' && (config.split ?? true)) {
    const whole = made.pre_tokenize_text.bind(made);
    made.pre_tokenize_text = (text, more) => whole(text, more).flatMap((word) => joined(word, new RegExp(made.str_rep, 'gu'), 'MergedWithNext'));
  } else if (config.type === 'Split' && made.pattern && !config.invert && config.behavior?.startsWith('MergedWith')) {
    made.pre_tokenize_text = (text) => joined(text, made.pattern, config.behavior);
  }
}

/** Words between what matches, which goes to one of its neighbours. */
function joined(text, pattern, behavior) {
  const cuts = [0];
  for (const { 0: match, index } of text.matchAll(pattern)) cuts.push(behavior === 'MergedWithNext' ? index : index + match.length);
  return [...new Set([...cuts, text.length])].map((cut, i, all) => text.slice(cut, all[i + 1])).slice(0, -1);
}
