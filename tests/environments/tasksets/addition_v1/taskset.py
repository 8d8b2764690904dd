import verifiers.v1 as vf

from addition_v1.servers.tool import AdditionToolset


class AdditionData(vf.TaskData):
    answer: int


class AdditionTask(vf.Task[AdditionData]):
    @vf.reward
    async def exact_match(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class AdditionConfig(vf.TasksetConfig):
    num_tasks: int = 100
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class AdditionTaskset(vf.Taskset[AdditionTask, AdditionConfig]):
    def load(self) -> list[AdditionTask]:
        return [
            AdditionTask(AdditionData(idx=i, prompt=f"What is {i} + {i}?", answer=2 * i), self.config.task)  # pyright: ignore[reportCallIssue]
            for i in range(self.config.num_tasks)
        ]

    @classmethod
    def toolsets(cls, config: AdditionConfig) -> list[vf.Toolset]:
        return [AdditionToolset(config.tools)]
