/** Where the library's Jinja is another than Python's in what chat templates do. */

import { Told } from './device.mjs';
import { Interpreter } from './vendor/jinja.mjs';
import { strip } from './strip.mjs';

const SIDES = { strip: {}, lstrip: { right: false }, rstrip: { left: false } };
const { evaluateBlock, evaluateBinaryExpression, evaluateCallExpression, applyFilter } = Interpreter.prototype;
const UNKNOWN = /^Unknown .*filter/;
const isText = (value) => value.type === 'StringValue';

/** What Python would write, and the page cannot: where it is tried, it is not as if the template had refused it. */
export class NotHere extends Told {}
/** A list or an object outside of JSON. */
export class Notation extends NotHere {}

/** Statements, which have no value of their own to write out. */
const STATEMENTS = ['Set', 'Macro', 'Comment'];
const LEAVES_A_LOOP = ['BreakControl', 'ContinueControl'];

/** Nothing and truth values are written as in Python; what the library would drop, or write in a notation of its own, is refused. */
Interpreter.prototype.evaluateBlock = function (statements, environment) {
  const written = evaluateBlock.call(this, [], environment);
  for (const statement of statements) {
    try {
      const value = this.evaluate(statement, environment);
      if (!STATEMENTS.includes(statement.type)) written.value += inPython(value);
    } catch (error) {
      if (written.value && LEAVES_A_LOOP.includes(error.constructor.name)) throw new NotHere('it leaves a loop after printing something in it');
      throw error;
    }
  }
  return written;
};

function inPython(value) {
  if (value.type === 'UndefinedValue') return '';
  if (value.type === 'NullValue') return 'None';
  if (value.type === 'BooleanValue') return value.value ? 'True' : 'False';
  const size = value.value?.length ?? value.value?.size;
  if (!isText(value) && size > 0) throw new Notation('it prints a list or an object, which Python formats differently');
  return value.toString();
}

/** As MarkupSafe's: a text that is safe makes that which is added to it safe, too. */
const safe = (text) => Object.defineProperties(text, { isSafe: { value: true }, builtins: { value: new Map() } }); // methods escape, too

const ESCAPED = { '&': '&amp;', '<': '&lt;', '>': '&gt;', "'": '&#39;', '"': '&#34;' };
const escaped = ({ isSafe, value }) => (isSafe ? value : value.replace(/[&<>'"]/g, (character) => ESCAPED[character]));

/** Adding something else to a text is an error there, and a list of parts would be written out here. */
Interpreter.prototype.evaluateBinaryExpression = function (node, environment) {
  if (node.operator.value === '+') {
    const [left, right] = [this.evaluate(node.left, environment), this.evaluate(node.right, environment)];
    if (isText(left) !== isText(right)) throw new Error('only a string can be added to a string');
    if (left.isSafe || right.isSafe) return safe(new left.constructor(escaped(left) + escaped(right)));
    if (isText(left)) return new left.constructor(left.value + right.value);
  }
  return evaluateBinaryExpression.call(this, node, environment);
};

/** What is stripped may be named; here it would always be white space. */
Interpreter.prototype.evaluateCallExpression = function (node, environment) {
  const { callee } = node;
  if (callee.type === 'MemberExpression' && !callee.computed && callee.property.value in SIDES) {
    const object = this.evaluate(callee.object, environment);
    const [characters] = this.evaluateArguments(node.args, environment)[0];
    if (isText(object)) return new object.constructor(strip(object.value, characters?.value ?? null, SIDES[callee.property.value]));
  }
  try {
    return evaluateCallExpression.call(this, node, environment);
  } catch (error) {
    if (callee.type === 'MemberExpression' && !callee.computed) {
      const object = this.evaluate(callee.object, environment);
      if (isText(object) && !object.builtins.has(callee.property.value)) throw new NotHere(`it uses the string method ${callee.property.value}, which the page does not support`);
    }
    throw error;
  }
};

Interpreter.prototype.applyFilter = function (operand, node, environment) {
  if (isText(operand) && node.value === 'safe') return safe(new operand.constructor(operand.value));
  if (operand.isSafe) throw new NotHere('it filters a string that is marked safe, which Python escapes differently');
  if (node.type === 'Identifier' && node.value === 'trim' && isText(operand)) return new operand.constructor(strip(operand.value));
  // As JSON, which has nothing that is not there.
  if ((node.value ?? node.callee?.value) === 'tojson' && operand.type === 'UndefinedValue') throw new Error('an undefined value cannot be written as JSON');
  try {
    return applyFilter.call(this, operand, node, environment);
  } catch (error) {
    if (operand.type !== 'ArrayValue' && UNKNOWN.test(error.message)) throw new NotHere(`${error.message}, which the page does not support`);
    throw error;
  }
};
