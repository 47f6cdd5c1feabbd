/** What training does with its rows, in a number that is kept: a page that reads or orders them otherwise has another. */

const [OFFSET, PRIME] = [0x811c9dc5, 0x01000193]; // of FNV-1a, here over whole numbers

/**
 * @param {import('./training.mjs').Training} training
 * @param {{ids: number[], labels: number[]}[]} held The rows that are held out.
 */
export function courseOf({ plan, examples, total }, held) {
  let hash = OFFSET;
  const take = (number) => (hash = Math.imul(hash ^ number, PRIME));
  for (const { ids, labels } of [...examples, ...held]) {
    take(ids.length);
    ids.forEach(take);
    labels.forEach(take);
  }
  take(total);
  for (const block of plan.blocks(0)) block.flat().forEach(take);
  return hash >>> 0;
}
