/** What messages say of themselves: whether they are trained on, in the words of other trainers; as data/conversations.py. */

import { Told } from './device.mjs';
import { isSome, OddNumber } from './json.mjs';

const WEIGHT = 'weight'; // OpenAI's, of the assistant's messages
const TRAINS = ['train', 'training', 'loss', 'loss_weight']; // Axolotl's, ms-swift's and LLaMA-Factory's, of anyone's
const PARTS = ['train_detail', 'training_detail']; // Axolotl's, of passages
const MARKS = [WEIGHT, ...TRAINS];
const ASKS = /(\.|\[['"])(weight|train|training|loss|loss_weight)\b/;

/** Whether a template marks what is trained on by what messages say, and so knows better. */
export const decides = (template) => template.marks && ASKS.test(template.source);

/** Whether a key is of what a message says of itself. */
export const isMark = (key) => MARKS.includes(key) || PARTS.includes(key);

/** Whether a message says that it is not trained on. */
export const isSpared = (message) => MARKS.some((mark) => says(message[mark], 0));

/** Whether a message says that it is trained on, whoever it is from; OpenAI's weights are of the assistant's alone. */
export const isAskedFor = (message) => !isSpared(message) && TRAINS.some((mark) => says(message[mark], 1));

/** What a message says of itself, by the words for it. */
export const marksOf = (message) => Object.fromEntries(Object.entries(message).filter(([key, value]) => isMark(key) && value !== null));

/** Refuses what is neither trained on nor not, of a message that is called by a name. */
export function checkMarks(message, name) {
  for (const mark of MARKS) {
    const value = message[mark] ?? null;
    if (value === null || says(value, 0) || says(value, 1)) continue;
    const given = JSON.stringify(value instanceof OddNumber ? value.value : value).slice(0, 40);
    if (mark === WEIGHT) throw new Told(`${name} has the weight ${given}, but the weight of a turn must be 0 or 1`);
    throw new Told(`${name} has ${mark}: ${given}, which must be true or false`);
  }
  const parts = PARTS.find((key) => isSome(message[key]));
  if (parts && !isSpared(message)) {
    throw new Told(`${name} has ${parts}, which is not supported: set train: true or false for the whole turn`);
  }
}

function says(given, what) {
  const value = given instanceof OddNumber ? given.value : given;
  return (typeof value === 'number' || typeof value === 'boolean') && Number(value) === what;
}
