/** Where the library's Jinja is another than Python's in what chat templates do. */

import { Interpreter } from './vendor/jinja.mjs';
import { strip } from './strip.mjs';

const SIDES = { strip: {}, lstrip: { right: false }, rstrip: { left: false } };
const { evaluateBinaryExpression, evaluateCallExpression, applyFilter } = Interpreter.prototype;
const isText = (value) => value.type === 'StringValue';

/** Adding something else to a text is an error there, and a list of parts would be written out here. */
Interpreter.prototype.evaluateBinaryExpression = function (node, environment) {
  if (node.operator.value === '+') {
    const [left, right] = [this.evaluate(node.left, environment), this.evaluate(node.right, environment)];
    if (isText(left) !== isText(right)) throw new Error('only a text can be added to a text');
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
  return evaluateCallExpression.call(this, node, environment);
};

Interpreter.prototype.applyFilter = function (operand, node, environment) {
  if (node.type === 'Identifier' && node.value === 'trim' && isText(operand)) return new operand.constructor(strip(operand.value));
  return applyFilter.call(this, operand, node, environment);
};
