// What Python calls of the compiled core; `lowering/compiled.py` does.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "core.h"

namespace py = pybind11;

namespace helixpipe {

void bind_orders(py::module_& module);
void bind_pipeline_times(py::module_& module);
void bind_split_backwards(py::module_& module);

namespace {

constexpr const char* kKinds = "FBIWR";

// A small whole number of a tuple; anything else is for Python to refuse.
int number_at(PyObject* op, Py_ssize_t at) {
  PyObject* value = PyTuple_GET_ITEM(op, at);
  if (!PyLong_CheckExact(value)) throw std::invalid_argument("an op names something that is no number");
  int overflow = 0;
  const long found = PyLong_AsLongAndOverflow(value, &overflow);
  if (overflow || found < 0 || found > 1'000'000'000) throw std::invalid_argument("an op is out of range");
  return static_cast<int>(found);
}

std::shared_ptr<Index> index_of(const py::tuple& ranks, const Numbers& chunks, int num_stages) {
  auto made = std::make_shared<Index>();
  made->num_ranks = static_cast<int>(ranks.size());
  made->num_stages = num_stages;
  for (const int each : chunks) {
    made->offsets.push_back(made->per_stage);
    made->per_stage += each;
  }
  for (Numbers& tasks : made->tasks) tasks.assign(static_cast<std::size_t>(num_stages) * made->per_stage, -1);
  made->first.push_back(0);
  for (int rank = 0; rank < made->num_ranks; ++rank) {
    PyObject* own = PyTuple_GET_ITEM(ranks.ptr(), rank);
    if (!PyTuple_Check(own)) throw std::invalid_argument("a rank's ops are no tuple");
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(own); ++at) {
      PyObject* op = PyTuple_GET_ITEM(own, at);
      if (!PyTuple_Check(op) || PyTuple_GET_SIZE(op) != 4) throw std::invalid_argument("an op is no op");
      PyObject* letter = PyTuple_GET_ITEM(op, 0);
      if (!PyUnicode_Check(letter) || PyUnicode_GET_LENGTH(letter) != 1) throw std::invalid_argument("no kind of op");
      const Py_UCS4 name = PyUnicode_READ_CHAR(letter, 0);
      const char* kind = name && name < 128 ? std::strchr(kKinds, static_cast<int>(name)) : nullptr;
      const int stage = number_at(op, 1), microbatch = number_at(op, 2), chunk = number_at(op, 3);
      if (kind == nullptr || stage >= num_stages || microbatch >= static_cast<int>(chunks.size()) ||
          chunk >= chunks[microbatch]) {
        throw std::invalid_argument("an op is out of range");
      }
      const int unit = made->unit_of(stage, microbatch, chunk), task = made->num_ops();
      int& there = made->tasks[kind - kKinds][unit];
      if (there >= 0) {
        made->twice = true;
      } else {
        there = task;
      }
      made->kind.push_back(static_cast<char>(kind - kKinds));
      made->rank.push_back(rank);
      made->stage.push_back(stage);
      made->microbatch.push_back(microbatch);
      made->chunk.push_back(chunk);
      made->unit.push_back(unit);
    }
    made->first.push_back(made->num_ops());
  }
  return made;
}

Flags flags(const std::vector<bool>& given) { return Flags(given.begin(), given.end()); }

Figures durations(const Graph& graph, const Figures& times, const Figures& added) {
  const Groups& alike = graph.tasks_alike();
  Figures found(graph.num_tasks());
  for (int task = 0; task < graph.num_tasks(); ++task) {
    const int group = alike.of[task];
    found[task] = group < 0 ? 0.0 : times.at(group);
    if (task < static_cast<int>(added.size())) found[task] += added[task];
  }
  return found;
}

py::list lists(const Lists& given, int count) {
  py::list made(count);
  for (int key = 0; key < count; ++key) made[key] = py::cast(Numbers(given.begin(key), given.end(key)));
  return made;
}

py::list tuples(const Lists& given, int count) {
  py::list made(count);
  for (int key = 0; key < count; ++key) {
    const int* begin = given.begin(key);
    py::tuple own(given.end(key) - begin);
    for (std::size_t at = 0; at < own.size(); ++at) own[at] = py::int_(begin[at]);
    made[key] = std::move(own);
  }
  return made;
}

py::tuple transfer_fields(const Graph& graph, int number) {
  const Transfer& own = graph.transfers.at(number);
  const Numbers& ranks = graph.resource_ranks[own.resource];
  py::tuple of(ranks.size());
  for (std::size_t at = 0; at < ranks.size(); ++at) of[at] = py::int_(ranks[at]);
  return py::make_tuple(own.kind, std::move(of), own.stage, own.microbatch, own.chunk, own.producer, own.consumer,
                        own.follows);
}

py::tuple buffer_fields(const Graph& graph, int number) {
  const Buffer& own = graph.buffers.at(number);
  return py::make_tuple(own.kind, own.rank, own.stage, own.microbatch, own.chunk, own.host);
}

// What costs are asked of, and for each group which of these it is like. stages, resources: as of `Alike`.
auto sampled(Groups (Graph::*samples)(const Alike&) const) {
  return [samples](const Graph& self, Numbers stages, Numbers resources) {
    Groups made = (self.*samples)({std::move(stages), std::move(resources)});
    return std::make_pair(std::move(made.first), std::move(made.of));
  };
}

// A program with its one order, projected onto ranks.
struct Lowered {
  std::shared_ptr<Graph> graph;
  Numbers order;
  Streams streams;
};

void bind_graph(py::module_& module) {
  py::class_<Tables, std::shared_ptr<Tables>>(module, "Tables")
      .def(py::init([](std::vector<std::string> kinds,
                       const std::vector<std::tuple<std::string, int, int, int, bool, bool>>& rows,
                       const std::vector<bool>& of_weights) {
        std::vector<TransferRow> made;
        for (const auto& [name, resource, moves, waited, passed_on, beside_ops] : rows) {
          made.push_back({name, resource, moves, waited, passed_on, beside_ops});
        }
        return std::make_shared<Tables>(std::move(kinds), std::move(made), flags(of_weights));
      }));
  py::class_<Index, std::shared_ptr<Index>>(module, "Index")
      .def(py::init(&index_of))
      .def_readonly("per_stage", &Index::per_stage)
      .def_readonly("twice", &Index::twice)
      .def_readonly("ranks", &Index::rank)
      .def_readonly("units", &Index::unit)
      .def_readonly("first", &Index::first)
      .def("tasks", [](const Index& self, int kind) { return self.tasks.at(kind); })
      .def("whole_units",
           [](const Index& self, bool forward_only, const std::vector<bool>& recomputes) {
             return self.whole_units(forward_only, flags(recomputes));
           })
      .def("together", py::overload_cast<int>(&Index::together, py::const_))
      .def("together", py::overload_cast<int, const std::vector<Numbers>&>(&Index::together, py::const_))
      .def("home", [](const Index& self, int stage) {
        return self.rank[self.tasks[kForward].at(static_cast<std::size_t>(stage) * self.per_stage)];
      });
  py::class_<Graph, std::shared_ptr<Graph>>(module, "Graph")
      .def(py::init([](std::shared_ptr<Index> index, std::shared_ptr<Tables> tables, Numbers extents, Numbers rows,
                       Numbers activations, const std::vector<bool>& recompute, bool forward_only) {
        Likeness alike{std::move(extents), std::move(rows), std::move(activations), flags(recompute)};
        return std::make_shared<Graph>(std::move(index), std::move(tables), std::move(alike), forward_only);
      }))
      .def("activations", &Graph::activations)
      .def("keys_values", &Graph::keys_values)
      .def("wait", &Graph::wait)
      .def("read", &Graph::read)
      .def("reads_too", [](Graph& self, int task, int number) { self.reads_made.add(task, number); })
      .def("frees_too", [](Graph& self, int task, int number) { self.frees_made.add(task, number); })
      .def("buffer",
           [](Graph& self, int kind, int rank, int stage, int microbatch, int chunk, bool host, int writer,
              int freed_by) { return self.buffer({kind, rank, stage, microbatch, chunk, host}, writer, -1, freed_by); })
      .def("transfer", &Graph::transfer)
      .def("gives", [](Graph& self, int op, int number) { self.gives.at(op) = number; })
      .def("takes", [](Graph& self, int op, int number) { self.takes.at(op) = number; })
      .def("given", [](const Graph& self, int op) { return self.gives.at(op); })
      .def("lend", [](Graph& self, int op, int number) { self.weights_of.at(op) = number; })
      .def("collect", [](Graph& self, int op, int number) { self.sum_of.at(op) = number; })
      .def("unit_order", &Graph::unit_order)
      .def("finish", &Graph::finish)
      .def_property_readonly("num_tasks", &Graph::num_tasks)
      .def_property_readonly("num_ops", &Graph::num_ops)
      .def_property_readonly("num_transfers", [](const Graph& self) { return self.transfers.size(); })
      .def_property_readonly("num_buffers", [](const Graph& self) { return self.buffers.size(); })
      .def("count", [](const Graph& self, int kind) { return self.count.at(kind); })
      .def("transfer_fields", &transfer_fields)
      .def("buffer_fields", &buffer_fields)
      .def("successors", [](const Graph& self) { return lists(self.successors, self.num_tasks()); })
      .def("writes", [](const Graph& self) { return tuples(self.writes, self.num_tasks()); })
      .def("reads", [](const Graph& self) { return tuples(self.reads, self.num_tasks()); })
      .def("frees", [](const Graph& self) { return tuples(self.frees, self.num_tasks()); })
      .def_readonly("num_dependencies", &Graph::waiting)
      .def_readonly("writer", &Graph::writer)
      .def_readonly("all_taken", &Graph::takes)
      .def_readonly("all_given", &Graph::gives)
      .def_readonly("saved", &Graph::saved)
      .def_readonly("weights_of", &Graph::weights_of)
      .def_readonly("sum_of", &Graph::sum_of)
      .def("recomputes",
           [](const Graph& self) {
             Numbers tasks;
             for (int task = 0; task < self.num_ops(); ++task) {
               if (self.recomputes[task]) tasks.push_back(task);
             }
             return tasks;
           })
      .def("place",  // the rank of an op, and its place there
           [](const Graph& self, int task) {
             const int rank = self.index().rank.at(task);
             return std::make_pair(rank, task - self.index().first[rank]);
           })
      .def_readonly("resource_ranks", &Graph::resource_ranks)
      .def("samples", sampled(&Graph::samples_of_tasks))
      .def("schedule",
           [](const Graph& self, const Figures& times) {
             return std::make_shared<Times>(list_schedule(self, durations(self, times, {}), nullptr));
           })
      .def("against_own_order", &Graph::against_own_order)
      .def("ended", &Graph::ended)
      .def("sizes_alike", sampled(&Graph::samples_of_sizes))
      .def("workspaces_alike", sampled(&Graph::samples_of_workspaces));
}

void bind_times(py::module_& module) {
  py::class_<Times, std::shared_ptr<Times>>(module, "Times")
      .def_readonly("start", &Times::start)
      .def_readonly("end", &Times::end)
      .def_readonly("order", &Times::order)
      .def_readonly("crowded", &Times::crowded)
      .def_property_readonly("makespan", &Times::makespan)
      .def_property_readonly("num_ended", [](const Times& self) { return self.order.size(); })
      .def("busy", [](const Times& self, const Graph& graph) {  // as Timeline.busy
        Figures busy(graph.index().num_ranks, 0.0);
        for (int task = 0; task < graph.num_ops(); ++task) {
          busy[graph.index().rank[task]] += self.end[task] - self.start[task];
        }
        return busy;
      })
      .def("spans", [](const Times& self, const Graph& graph) {  // of each rank: when its first op starts, its last ends
        std::vector<std::pair<double, double>> found;
        const Numbers& first = graph.index().first;
        for (int rank = 0; rank < graph.index().num_ranks; ++rank) {
          if (first[rank] < first[rank + 1]) found.emplace_back(self.start[first[rank]], self.end[first[rank + 1] - 1]);
        }
        return found;
      });
}

void bind_lowered(py::module_& module) {
  py::class_<Categories>(module, "Categories")
      .def(py::init([](int count, int activations, int messages, int workspace, Numbers of,
                       const std::vector<bool>& given, const std::vector<bool>& taken, const std::vector<bool>& pooled) {
        return Categories{count,        activations, messages,       workspace, std::move(of),
                          flags(given), flags(taken), flags(pooled)};
      }));
  py::class_<Lowered, std::shared_ptr<Lowered>>(module, "Lowered")
      .def(py::init([](std::shared_ptr<Graph> graph, const Times& times, bool rings, const std::vector<bool>& shipped,
                       int slack) {
        Numbers order = without_holds(*graph, times, rings);
        Streams streams = project(*graph, times, order, flags(shipped), slack);
        return std::make_shared<Lowered>(Lowered{std::move(graph), std::move(order), std::move(streams)});
      }))
      .def_readonly("order", &Lowered::order)
      .def_property_readonly("openings", [](const Lowered& self) { return self.streams.openings; })
      .def("stream",
           [](const Lowered& self, int rank) {
             const std::vector<char>& actions = self.streams.actions.at(rank);
             return std::make_pair(Numbers(actions.begin(), actions.end()), self.streams.tasks[rank]);
           })
      .def("times",
           [](const Lowered& self, const Figures& times, const Figures& added) {
             const Given given = given_by_streams(*self.graph, self.streams, self.order);
             return std::make_shared<Times>(list_schedule(*self.graph, durations(*self.graph, times, added), &given));
           })
      .def("sweep", [](const Lowered& self, const Categories& categories, const Figures& sizes,
                       const Figures& workspaces) {
        const Graph& graph = *self.graph;
        const Numbers &size_of = graph.sizes_alike().of, &workspace_of = graph.workspaces_alike().of;
        std::vector<std::tuple<double, Figures, double, double>> found;
        for (Peak& peak : sweep(graph, self.streams, categories, sizes, size_of, workspaces, workspace_of)) {
          found.emplace_back(peak.activations, std::move(peak.most), peak.host, peak.received);
        }
        return found;
      });
}

}  // namespace
}  // namespace helixpipe

PYBIND11_MODULE(_core, module) {
  module.attr("INTERFACE") = 8;
  py::register_exception<helixpipe::Incomplete>(module, "Incomplete");
  helixpipe::bind_graph(module);
  helixpipe::bind_times(module);
  helixpipe::bind_lowered(module);
  helixpipe::bind_orders(module);
  helixpipe::bind_pipeline_times(module);
  helixpipe::bind_split_backwards(module);
}
