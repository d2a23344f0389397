"""The tab's backend over a logdir, in this process: TensorBoard's own Python data path below it."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from werkzeug.test import Client

from tb_memplugin.server.backend import Backend
from tb_memplugin.server.routes import ROUTES
from tests.server.contract import differences

KEEP_ALL = {"tb_memplugin": 0}


class Tab:
    """Asks routes as a browser would. Every answer must be what its route declares."""

    def __init__(self, logdir: Any, *, logdir_spec: bool = False) -> None:
        self._logdir = str(logdir)
        self._multiplexer = EventMultiplexer(tensor_size_guidance=KEEP_ALL)
        provider = MultiplexerDataProvider(self._multiplexer, self._logdir)
        self.backend = Backend(TBContext(data_provider=provider, logdir="" if logdir_spec else self._logdir))
        self._apps = self.backend.apps
        self.reload()

    def reload(self) -> None:
        self._multiplexer.AddRunsFromDirectory(self._logdir)
        self._multiplexer.Reload()

    def answer(self, route: str, method: str = "GET", **parameters: Any) -> tuple[int, Any]:
        response = Client(self._apps[f"/{route}"]).open("/", method=method, query_string=parameters)
        body = json.loads(response.get_data())
        if response.status_code == 200:
            assert list(differences(body, get_type_hints(ROUTES[f"/{route}"])["return"])) == []
        return response.status_code, body

    def get(self, route: str, **parameters: Any) -> Any:
        status, body = self.answer(route, **parameters)
        assert status == 200, body
        return body

    def refused(self, route: str, **parameters: Any) -> tuple[int, dict[str, str]]:
        status, body = self.answer(route, **parameters)
        assert 400 <= status < 500, body
        return status, body["error"]

    def static(self, name: str, **headers: str) -> Any:
        return Client(self._apps["/static/*"]).get(
            f"/data/plugin/tb_memplugin/static/{name}", headers=headers
        )
