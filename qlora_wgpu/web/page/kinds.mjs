/** What rows look like that a site takes, for people who have not written any yet. */

const CHATS = ['messages', 'conversations'];
const ROWS = {
  messages: { messages: [{ role: 'user', content: 'A question' }, { role: 'assistant', content: 'Its answer' }] },
  conversations: { conversations: [{ from: 'human', value: 'A question' }, { from: 'gpt', value: 'Its answer' }] },
  'prompt/completion': { prompt: 'A question', completion: ' Its answer' },
  'instruction/output': { instruction: 'A task', input: 'Its input', output: 'Its output' },
  text: { text: 'A document to train on' },
};

/**
 * A row in each format, as lines of a .jsonl file.
 *
 * @param {{format: string, columns: Record<string, string>, train_on: string}} how What the site takes.
 * @param {boolean} chats Whether it has a chat template.
 * @returns {string[]}
 */
export function kindsOf({ format, columns, train_on: trained }, chats) {
  const named = ([key, value]) => [columns[key] ?? key, value];
  return Object.entries(ROWS)
    .filter(([name]) => format === 'auto' || format === name)
    .filter(([name]) => chats || !CHATS.includes(name))
    .filter(([name]) => name !== 'text' || ['auto', 'all'].includes(trained))
    .filter(([, row]) => Object.keys(columns).every((key) => key in row))
    .map(([, row]) => JSON.stringify(Object.fromEntries(Object.entries(row).map(named))));
}
