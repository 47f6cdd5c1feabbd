/** The adapter's two files, as PEFT loads them. */

const padded = (n) => Math.ceil(n / 8) * 8; // of rows on the device

/**
 * adapter_model.safetensors.
 *
 * @param {Float32Array} flat The adapter as it lies on the device.
 * @param {Record<string, [number, number, number]>} tensors First element, rows (0: a vector), columns, by PEFT's names.
 * @returns {Uint8Array}
 */
export function adapterFile(flat, tensors) {
  const header = { __metadata__: { format: 'pt' } };
  const pieces = [];
  let end = 0;
  for (const name of Object.keys(tensors).sort()) {
    const [, rows, columns] = tensors[name];
    const dense = tensorOf(flat, tensors[name]);
    const shape = rows ? [rows, columns] : [columns];
    header[name] = { dtype: 'F32', shape, data_offsets: [end, (end += dense.byteLength)] };
    pieces.push(dense);
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const space = Math.ceil(text.length / 8) * 8;
  const file = new Uint8Array(8 + space + end).fill(32, 8, 8 + space);
  new DataView(file.buffer).setBigUint64(0, BigInt(space), true);
  file.set(text, 8);
  let at = 8 + space;
  for (const piece of pieces) {
    file.set(new Uint8Array(piece.buffer), at);
    at += piece.byteLength;
  }
  return file;
}

/** A tensor without the padding of its rows. */
function tensorOf(flat, [offset, rows, columns]) {
  const count = Math.max(rows, 1);
  const dense = new Float32Array(count * columns);
  for (let r = 0; r < count; r++) {
    const first = offset + r * padded(columns);
    dense.set(flat.subarray(first, first + columns), r * columns);
  }
  return dense;
}
