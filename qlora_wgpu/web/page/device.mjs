/** Opening a GPU: sentences for what is missing, limits as the plans need them. */

/** A mistake or a lack that a sentence tells; the page shows it as it is. */
export class Told extends Error {}

/** There is no GPU now, which may be so for a while after one was lost. */
export class NoGpu extends Told {}

const SWITCHES = [
  [/Firefox/, 'In Firefox, open about:config and set dom.webgpu.enabled to true'],
  [/Edg\//, 'In Edge, open edge:flags and enable "Unsafe WebGPU Support"'],
  [/Chrom/, 'In Chrome, open chrome:flags and enable "Unsafe WebGPU Support", and on Linux also "Vulkan"'],
  [/Safari/, 'Use Safari 26 or later, or enable WebGPU in Settings, Feature Flags'],
];

/** What to do in this browser to get WebGPU. */
export function remedy(userAgent) {
  const found = SWITCHES.find(([pattern]) => pattern.test(userAgent));
  return found ? found[1] : 'Use a current Chrome, Edge, Firefox or Safari';
}

/**
 * The variants of a site that are tiled for a vendor's GPUs; those for all others if there are none.
 *
 * @template {{vendors: string[]}} V
 * @param {V[]} variants
 * @param {string} vendor
 * @returns {V[]}
 */
export function cutFor(variants, vendor) {
  const own = variants.filter(({ vendors }) => vendors.includes(vendor));
  return own.length ? own : variants.filter(({ vendors }) => !vendors.length);
}

/**
 * Opens a device that keeps to what the plans need.
 *
 * @param {GPU} gpu navigator.gpu, or undefined.
 * @param {Record<string, number>} needs Limits by WebGPU's names.
 * @param {string} userAgent The browser, for messages.
 * @returns {Promise<{device: GPUDevice, vendor: string}>} With the vendor as WebGPU names it, '' if it does not.
 * @throws {Told} If there is none.
 */
export async function openDevice(gpu, needs, userAgent = '') {
  if (!gpu) throw new Told(`This browser does not support WebGPU. ${remedy(userAgent)}.`);
  const adapter = await gpu.requestAdapter({ powerPreference: 'high-performance' });
  if (!adapter) {
    throw new NoGpu(`This browser found no usable GPU. ${remedy(userAgent)}, and update the GPU driver.`);
  }
  const requiredLimits = {};
  for (const [name, value] of Object.entries(needs)) {
    if (value > adapter.limits[name]) {
      throw new Told(`This model needs ${name} = ${value.toLocaleString('en')}, but this GPU allows ` +
        `${adapter.limits[name].toLocaleString('en')}: use a smaller model, or another machine.`);
    }
    // Less than the default is an error in no browser, but says nothing either.
    requiredLimits[name] = value;
  }
  try {
    const device = await adapter.requestDevice({ requiredLimits }); // no kernel of a page needs a feature
    return { device, vendor: adapter.info?.vendor ?? '' };
  } catch (error) {
    throw new NoGpu(`Failed to open the GPU: ${error.message}`);
  }
}
