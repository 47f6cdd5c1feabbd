"""A cluster whose workers live in this process: no scheduler, and no block comes out of turn."""

import pickle

from qlora_wgpu.cluster.blocks import BlockRequest
from qlora_wgpu.cluster.owner import Cluster, GradientSum


class WorkersHere(Cluster):
    """Workers that compute blocks in turn; what they get and give is pickled, as on its way."""

    dashboard = None

    def __init__(self, settings, worker_class, specify, check, warn, *, processes):
        self.workers = [worker_class(specify(str(number))) for number in range(processes)]
        self.identities = {str(n): worker.identity() for n, worker in enumerate(self.workers)}
        self.version, self.asked = 0, []
        self._devices = set()
        for identity in self.identities.values():
            assert check(identity) is None
            self._devices.add((identity.device, identity.kernels))

    def close(self):
        pass

    def wait_for(self, count):
        return self.identities

    def take(self, model):
        self._sum = GradientSum(model)

    def worker_metrics(self):
        return ()

    @property
    def num_workers(self):
        return len(self.workers)

    def _query(self, method, *given, check):
        return check(getattr(self.workers[0], method)(BlockRequest(self.version, 0), *given))

    def _publish(self, parameters=None):
        self.version += 1
        parameters = self._sum.parameters() if parameters is None else parameters
        for worker in self.workers:
            worker.write(self.version, parameters)

    def _in_order(self, method, blocks, sizes, add, is_stopped=lambda: False, *, is_query=False):
        self.asked.append((method, len(blocks)))
        assert len(sizes) == len(blocks)
        for number, block in enumerate(blocks):
            worker = self.workers[number % len(self.workers)]
            asked = BlockRequest(self.version, number)
            told = getattr(worker, method)(asked, *pickle.loads(pickle.dumps(block.given)))
            add(block.check(asked, pickle.loads(pickle.dumps(told))))
        return True
