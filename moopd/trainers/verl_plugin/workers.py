"""verl's worker with the frozen teacher as reference model, and a second teacher where needed.

verl takes the actor's path for its reference; the one hook used here is the class that verl
instantiates for it (`ref_worker_cls`).
"""

from __future__ import annotations

import os
from copy import deepcopy
from typing import Any

from omegaconf import OmegaConf
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name
from verl.workers.config import MtpConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from moopd.trainers.verl_plugin.spec import load_run


class TeacherWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """Actor, rollout and frozen teachers of one training process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if get_device_name() == "cpu":
            from moopd.trainers.verl_plugin.cpu import prepare_worker

            prepare_worker()
        super().__init__(*args, **kwargs)
        self._run = load_run(str(self.config.moopd.run_file))
        self._second: TrainingWorker | None = None
        self._run.leave_proof(
            f"worker_{os.environ.get('RANK', '0')}", {"pid": os.getpid(), "module": __file__}
        )
        if self._run.reference_teacher is not None:
            self.ref_worker_cls = self._build_teachers

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))  # type: ignore[untyped-decorator]
    def compute_second_log_prob(self, data: Any) -> Any:
        """Log-probabilities under the OPD teacher where it is another than the KL teacher."""
        if self._second is None:
            raise ValueError("this run has one teacher; expected no call for a second")
        output = self._second.infer_batch(data=data)
        return None if output is None else output.cpu()

    def _build_teachers(self, config: Any) -> TrainingWorker:
        """Called by verl where it builds its reference model."""
        if self._run.second_teacher is not None:
            self._second = TrainingWorker(self._with_model(config, self._run.second_teacher))
            self._second.reset()
        return TrainingWorker(self._with_model(config, self._run.reference_teacher))

    def _with_model(self, config: Any, teacher: str | None) -> Any:
        """`config` of verl's reference model, with the teacher's folder as its model."""
        folder = self._run.teachers[str(teacher)]
        changed = deepcopy(config)
        model = OmegaConf.merge(self.config.model, {"path": folder})
        # verl's config classes refuse plain assignment.
        object.__setattr__(changed, "model_config", omega_conf_to_dataclass(model))
        object.__setattr__(changed.model_config, "mtp", MtpConfig(enable=False))
        self._run.leave_proof(f"teacher_{teacher}", {"folder": folder})
        return changed
