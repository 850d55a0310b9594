// The Python module of the native index (documented in indexer/_native.pyi).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <functional>

#include "choice.hpp"
#include "columns.hpp"
#include "json_check.hpp"
#include "json_numbers.hpp"
#include "json_outline.hpp"
#include "live_reader.hpp"
#include "shared_prefixes.hpp"

namespace nb = nanobind;
using namespace kvrouter;

namespace {

std::string_view view(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

nb::bytes as_bytes(std::string_view bytes) { return nb::bytes(bytes.data(), bytes.size()); }

// Return a copy of the numbers of an `array("Q")`, which the caller may extend later.
std::vector<u64> numbers(nb::handle array) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_CONTIG_RO) != 0) throw nb::python_error();
    std::vector<u64> copy(static_cast<std::size_t>(buffer.len) / sizeof(u64));
    if (!copy.empty()) std::memcpy(copy.data(), buffer.buf, copy.size() * sizeof(u64));
    PyBuffer_Release(&buffer);
    return copy;
}

// Return a batch's outcome in the form that `Index.apply` documents.
nb::object as_outcome(const Applied& applied) {
    if (applied.is_batch && applied.rejected.empty() && applied.foreign.empty())
        return nb::int_((applied.cleared ? 1 : 0) + (applied.new_block_size ? 2 : 0));
    nb::list rejected, foreign;
    for (const auto& each : applied.rejected) rejected.append(nb::make_tuple(each.index, each.reason));
    for (const auto& [at, bytes] : applied.foreign) foreign.append(nb::make_tuple(at, as_bytes(bytes)));
    return nb::make_tuple(applied.is_batch, applied.cleared, applied.new_block_size, rejected, foreign);
}

nb::object apply(
    Index& index, u32 number, const nb::bytes& payload, const std::optional<std::vector<std::pair<u32, nb::bytes>>>& known,
    bool trusted) {
    std::optional<std::vector<std::pair<u32, std::string>>> events;
    if (known) {
        events.emplace();
        for (const auto& [at, bytes] : *known) events->emplace_back(at, view(bytes));
    }
    Applied applied;
    {
        const std::string_view bytes = view(payload);
        const nb::gil_scoped_release others_run;
        applied = index.apply(number, bytes, events ? &*events : nullptr, trusted);
    }
    return as_outcome(applied);
}

// Return libzmq's functions. `functions` has their addresses, in the order of `Zmq`'s fields.
Zmq zmq_of(const std::vector<std::uintptr_t>& functions) {
    if (functions.size() != 7) throw nb::value_error("seven functions");
    return {
        reinterpret_cast<decltype(Zmq::init)>(functions[0]), reinterpret_cast<decltype(Zmq::receive)>(functions[1]),
        reinterpret_cast<decltype(Zmq::data)>(functions[2]), reinterpret_cast<decltype(Zmq::size)>(functions[3]),
        reinterpret_cast<decltype(Zmq::more)>(functions[4]), reinterpret_cast<decltype(Zmq::copy)>(functions[5]),
        reinterpret_cast<decltype(Zmq::close)>(functions[6])};
}

nb::list applied_runs(const LiveReader& reader) {
    nb::list runs;
    for (const AppliedRun& each : reader.applied())
        runs.append(nb::make_tuple(each.fd, each.first, each.last, as_bytes(each.payload->bytes()), each.bytes, each.received_at));
    return runs;
}

nb::list received(const LiveReader& reader) {
    const Inbox& inbox = reader.inbox();
    nb::list turns;
    for (std::size_t place = 0; place < reader.round().size(); ++place) {
        const Received& turn = inbox.received()[place];
        const bool is_run = turn.in_order && turn.count > 0;
        turns.append(nb::make_tuple(
            reader.round()[place], turn.count, turn.bytes, turn.largest, is_run ? nb::object(nb::int_(inbox.seq(turn.first))) : nb::none(),
            is_run ? as_bytes(inbox.payload(turn.first + turn.count - 1).bytes()) : nb::bytes("", 0)));
    }
    return turns;
}

nb::list messages(const LiveReader& reader, std::size_t place) {
    const Inbox& inbox = reader.inbox();
    const Received& turn = inbox.received().at(place);
    nb::list messages;
    for (std::size_t message = turn.first; message < turn.first + turn.count; ++message) {
        nb::list frames;
        inbox.each_frame(message, [&](std::string_view frame) { frames.append(as_bytes(frame)); });
        messages.append(frames);
    }
    return messages;
}

nb::object apply_received(LiveReader& reader) {
    Applied applied;
    std::optional<Inbox::Origin> origin;
    {
        const nb::gil_scoped_release others_run;
        origin = reader.apply(applied);
    }
    if (!origin) return nb::none();
    const Inbox& inbox = reader.inbox();
    return nb::make_tuple(origin->place, inbox.seq(origin->message), as_bytes(inbox.payload(origin->message).bytes()), as_outcome(applied));
}

// Python's lock is released while a body of more bytes is read.
constexpr std::size_t kLongBody = 256 * 1024;

nb::object named(const JsonCheck& check, const nb::bytes& body) {
    const std::string_view bytes = view(body);
    std::optional<std::string> kept;
    if (bytes.size() <= kLongBody) {
        kept = check.named(bytes);
    } else {
        const nb::gil_scoped_release others_run;
        kept = check.named(bytes);
    }
    return kept ? nb::object(nb::bytes(kept->data(), kept->size())) : nb::none();
}

nb::object as_str(const JsonText& text) {
    const std::size_t size = static_cast<std::size_t>(text.end - text.begin);
    PyObject* made;
    if (text.escaped) {
        const std::string plain = text.unescaped();
        made = PyUnicode_DecodeUTF8(plain.data(), static_cast<Py_ssize_t>(plain.size()), nullptr);
    } else if (text.ascii) {
        made = PyUnicode_New(static_cast<Py_ssize_t>(size), 127);
        if (made != nullptr) std::memcpy(PyUnicode_1BYTE_DATA(made), text.begin, size);
    } else {
        made = PyUnicode_DecodeUTF8(text.begin, static_cast<Py_ssize_t>(size), nullptr);
    }
    if (made == nullptr) throw nb::python_error();
    return nb::steal(made);
}

// Return what routing reads of a usual chat. Other plain bodies have only kept fields, as in `named`. A long body is
// treated as unusual, because the interpreter's lock is held meanwhile.
nb::object chat(const JsonCheck& check, const nb::bytes& body) {
    const std::string_view bytes = view(body);
    if (bytes.size() > kLongBody) return named(check, body);
    UsualChat read;
    const auto kept = check.named(bytes, &read);
    if (!kept) return nb::none();
    if (!read.usual || read.messages.empty() || read.model.begin == read.model.end) return as_bytes(*kept);
    static PyObject* const role = PyUnicode_InternFromString("role");
    static PyObject* const content = PyUnicode_InternFromString("content");
    nb::list messages;
    for (const auto& each : read.messages) {
        nb::dict message;
        message[nb::handle(role)] = as_str(each.role);
        message[nb::handle(content)] = as_str(each.content);
        messages.append(message);
    }
    const auto& limit = read.max_completion_tokens ? read.max_completion_tokens : read.max_tokens;
    return nb::make_tuple(as_str(read.model), messages, read.streamed, limit ? nb::object(nb::int_(*limit)) : nb::none());
}

nb::object json_outline(const nb::bytes& body, u64 most) {
    JsonOutline outline;
    bool read;
    {
        const std::string_view bytes = view(body);
        const nb::gil_scoped_release others_run;
        read = outline.read(bytes, most);
    }
    if (!read) return nb::none();
    nb::list fields;
    if (outline.values <= most)
        for (const auto& each : outline.fields) fields.append(nb::make_tuple(each.name, each.name_end, each.value, each.value_end));
    return nb::make_tuple(as_bytes(outline.text), fields, outline.values);
}

nb::tuple match(
    Index& index, u64 root, u64 block_size, const nb::bytes& tokens, nb::handle known, std::size_t blocks, u32 tier) {
    const std::size_t most = block_size == 0 ? 0 : tokens.size() / sizeof(u32) / block_size;
    PromptHashes hashes(root, block_size, view(tokens), numbers(known));
    // Python's lock is kept: the index's lock is held for a short time only, by threads that need no lock of Python's.
    const auto matches = index.match(hashes, std::min(blocks, most), tier);
    return nb::make_tuple(
        as_bytes({reinterpret_cast<const char*>(matches.data()), matches.size() * sizeof(Match)}), as_bytes(hashes.made()));
}

void learn(PoolBlocks& blocks, nb::handle hashes, nb::handle names) {
    const auto prefixes = numbers(hashes), engine = numbers(names);
    std::vector<Name> known;
    for (const u64 name : engine) known.push_back({name, {}, Name::kNumber});
    if (known.size() != prefixes.size()) throw nb::value_error("as many names as hashes");
    blocks.learn(prefixes, known);
}

nb::tuple match_pool(PoolBlocks& blocks, nb::handle hashes, u64 reach, u64 needed, u64 allowed) {
    std::vector<u32> ranges;
    blocks.match(numbers(hashes), reach, needed, allowed, ranges);
    return nb::make_tuple(ranges, needed);
}

nb::list stored_in_pool(PoolBlocks& blocks, nb::handle hashes) {
    nb::list found;
    for (const PoolBlocks::Stored& each : blocks.stored(numbers(hashes)))
        found.append(nb::make_tuple(each.name, nb::bytes(each.rest.data(), each.rest.size()), each.parts));
    return found;
}

nb::bytes match_hashes(Index& index, nb::handle known) {
    auto given = numbers(known);
    const std::size_t blocks = given.size();
    PromptHashes hashes(0, 0, {}, std::move(given));
    const auto matches = index.match(hashes, blocks);
    return as_bytes({reinterpret_cast<const char*>(matches.data()), matches.size() * sizeof(Match)});
}

nb::object status(Index& index, u32 number) {
    const auto status = index.status(number);
    if (!status) return nb::none();
    const Counters& counters = status->counters;
    return nb::make_tuple(
        nb::make_tuple(status->blocks[0], status->blocks[1], status->blocks[2], status->blocks[3]), status->orphans,
        nb::make_tuple(
            counters.stored, counters.removed, counters.cleared, counters.unknown_removed, counters.orphans_dropped,
            counters.over_capacity, counters.ignored),
        status->block_sizes, status->window ? nb::object(nb::int_(*status->window)) : nb::none());
}

nb::tuple kept(Index& index, u32 number) {
    const auto [held, removed] = index.kept(number);
    return nb::make_tuple(held, removed);
}

nb::bytes prefix_hashes(u64 seed, const nb::bytes& tokens, u64 block_size, std::size_t start, std::size_t end) {
    const std::size_t step = block_size * sizeof(u32);
    if (end > tokens.size() / std::max<std::size_t>(step, 1)) throw nb::index_error("there are fewer blocks");
    std::vector<u64> hashes;
    for (std::size_t block = start; block < end; ++block)
        hashes.push_back(seed = xxh3::hash(tokens.c_str() + block * step, step, seed));
    return as_bytes({reinterpret_cast<const char*>(hashes.data()), hashes.size() * sizeof(u64)});
}

nb::bytes numbers_json(const nb::bytes& packed, const nb::bytes& before, const nb::bytes& after) {
    const std::size_t size = before.size() + numbers_json_size(view(packed)) + after.size();
    PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
    if (made == nullptr) throw nb::python_error();
    char* at = PyBytes_AS_STRING(made);
    std::memcpy(at, before.c_str(), before.size());
    at = write_numbers_json(view(packed), at + before.size());
    std::memcpy(at, after.c_str(), after.size());
    return nb::steal<nb::bytes>(made);
}

// The memory of a Python `array` with elements of type T. Throws if it has fewer than `rows` elements.
template <typename T>
class Column {
public:
    Column(nb::handle array, bool writable, std::size_t rows = 0) {
        if (PyObject_GetBuffer(array.ptr(), &buffer_, writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO) != 0) throw nb::python_error();
        if (static_cast<std::size_t>(buffer_.len) < rows * sizeof(T)) {
            PyBuffer_Release(&buffer_);
            throw nb::value_error("a column is too short");
        }
    }
    Column(const Column&) = delete;
    Column& operator=(const Column&) = delete;
    ~Column() { PyBuffer_Release(&buffer_); }

    std::size_t size() const { return static_cast<std::size_t>(buffer_.len) / sizeof(T); }
    T* data() const { return static_cast<T*>(buffer_.buf); }

private:
    Py_buffer buffer_;
};

nb::tuple match_rows(
    Index& index, u64 root, u64 block_size, const nb::bytes& packed, nb::handle known, std::size_t blocks, nb::handle rows,
    nb::handle tokens) {
    const std::size_t most = block_size == 0 ? 0 : packed.size() / sizeof(u32) / block_size;
    PromptHashes hashes(root, block_size, view(packed), numbers(known));
    const auto matches = index.match(hashes, std::min(blocks, most));
    const Column<i32> row_of(rows, false);
    const Column<u32> column(tokens, true);
    nb::list others;
    for_better_rows(
        matches, block_size, {row_of.data(), row_of.size()}, {column.data(), column.size()},
        [&](u32 row, u64 cpu, u64 disk) { others.append(nb::make_tuple(row, cpu, disk)); });
    return nb::make_tuple(others, as_bytes(hashes.made()));
}

std::vector<u32> choose(
    nb::handle fixed, nb::handle per_token, nb::handle shares, nb::handle held, i64 tokens, i64 least, nb::handle depths,
    nb::handle others, const nb::dict& replaced, double near) {
    const Column<u32> held_column(held, false), depths_column(depths, false);
    const std::size_t rows = held_column.size();
    const Column<double> fixed_column(fixed, false, rows), per_token_column(per_token, false, rows);
    const Column<double> shares_column(shares, false, rows), others_column(others, false, depths_column.size());
    thread_local std::vector<double> costs;
    thread_local std::vector<u32> paid;
    costs.resize(rows);
    const u32* counted = held_column.data();
    if (depths_column.size() > 0) {
        paid.resize(rows);
        write_paid(
            counted, shares_column.data(), {depths_column.data(), depths_column.size()}, others_column.data(),
            {paid.data(), rows});
        counted = paid.data();
    }
    write_costs(fixed_column.data(), per_token_column.data(), counted, tokens, least, {costs.data(), rows});
    for (const auto [row, cost] : replaced) costs.at(nb::cast<std::size_t>(row)) = nb::cast<double>(cost);
    return lowest_rows({costs.data(), rows}, near);
}

u32 holders_of(nb::handle held, u32 tokens) {
    const Column<u32> column(held, false);
    return holders({column.data(), column.size()}, tokens);
}

u32 highest_of(nb::handle held) {
    const Column<u32> column(held, false);
    return highest({column.data(), column.size()});
}

SharedPrefixes::Hashes hashes_of(const Column<u64>& column) { return {column.data(), column.size()}; }

nb::dict longest(SharedPrefixes& prefixes, nb::handle hashes) {
    const Column<u64> column(hashes, false);
    nb::dict found;
    for (const auto& [holder, chunks] : prefixes.longest(hashes_of(column))) found[nb::int_(holder)] = chunks;
    return found;
}

// The holders of a tree of prefixes in rows: the tree, each holder's row, and the number of chunks between two hashes.
using HolderRows = std::tuple<SharedPrefixes*, nb::object, u64>;

void longest_rows(
    const HolderRows& tree, std::span<const u64> hashes, u64 chunk,
    const std::function<void(std::span<const std::pair<u32, u32>>, u64, std::span<const i32>)>& raise) {
    const auto& [prefixes, rows, stride] = tree;
    const Column<i32> row_of(rows, false);
    std::vector<u64> some;
    if (stride > 1) {
        for (std::size_t at = stride - 1; at < hashes.size(); at += stride) some.push_back(hashes[at]);
        hashes = some;
    }
    raise(prefixes->longest(hashes), chunk * stride, {row_of.data(), row_of.size()});
}

// Return the parts of a prompt that several sessions asked for (`PrefixDemand.asked`).
std::vector<Asked> asked_parts(
    const nb::dict& forks, std::span<const u64> hashes, u64 stride, u64 chunk, u32 held, double now, double horizon) {
    std::vector<Asked> asked;
    double sessions = 1.0;
    for (std::size_t read = hashes.size() / stride; read > 0; --read) {
        const nb::int_ hash(hashes[read * stride - 1]);
        if (!forks.contains(hash)) continue;
        const nb::object found = forks[hash];
        auto [end, counted, at] = nb::cast<std::tuple<u64, double, double>>(found);
        sessions += counted * std::exp((at - now) / horizon);
        if (asked.empty() && end < held && held < end + stride * chunk) end = held;
        asked.push_back({end, sessions});
    }
    std::reverse(asked.begin(), asked.end());
    return asked;
}

nb::tuple choose_target(
    Index& index, const nb::bytes& packed, const std::vector<std::tuple<u64, u64, std::size_t, nb::object>>& roots,
    const std::tuple<u64, u64, std::size_t, nb::object>& chunking, u64 length, nb::handle numbers_of,
    const std::vector<HolderRows>& in_flight, const std::optional<HolderRows>& sent, nb::handle units, nb::handle held,
    const std::tuple<nb::object, nb::object, nb::object>& lines, const std::tuple<i64, i64, double, double, double>& prices,
    const std::optional<std::tuple<nb::dict, u64, double, double, double>>& demand, const std::vector<u32>& excluded) {
    const Column<u32> column(held, true);
    const std::size_t rows = column.size();
    const Column<u32> unit_of(units, false, rows);
    const Column<i32> row_of(numbers_of, false);
    const std::span<u32> tokens{column.data(), rows};
    HeldRows found(tokens, {unit_of.data(), rows}, length);
    const auto& [seed, chunk, chunks, known_chunks] = chunking;
    PromptHashes hashes(seed, chunk, view(packed), numbers(known_chunks));
    if (chunks > hashes.all().size() && chunks * chunk * sizeof(u32) > packed.size()) throw nb::index_error("there are fewer chunks");
    if (chunks > 0) hashes[chunks - 1];
    const std::span<const u64> prompt = hashes.all().first(chunks);
    nb::list made;
    made.append(as_bytes(hashes.made()));
    for (const auto& [root, block_size, blocks, known] : roots) {
        const std::size_t most = std::min(blocks, block_size == 0 ? 0 : packed.size() / sizeof(u32) / block_size);
        if (known.is(known_chunks) && most <= chunks) {  // blocks are chunks
            found.match(index.match(hashes, most), block_size, {row_of.data(), row_of.size()});
            made.append(nb::bytes("", 0));
            continue;
        }
        PromptHashes of_blocks(root, block_size, view(packed), numbers(known));
        found.match(index.match(of_blocks, most), block_size, {row_of.data(), row_of.size()});
        made.append(as_bytes(of_blocks.made()));
    }
    u32 tree = 0;
    for (const HolderRows& each : in_flight) {
        longest_rows(each, prompt, chunk, [&](auto longest, u64 tokens_of_chunk, auto holder_rows) {
            found.raise_in_flight(tree, longest, tokens_of_chunk, holder_rows);
        });
        ++tree;
    }
    if (sent)
        longest_rows(*sent, prompt, chunk, [&](auto longest, u64 tokens_of_chunk, auto holder_rows) {
            found.raise_sent(tree, longest, tokens_of_chunk, holder_rows);
        });
    PaidParts parts;
    if (demand) {
        const auto& [forks, stride, now, horizon, spare] = *demand;
        const std::vector<Asked> asked = asked_parts(forks, prompt, stride, chunk, highest(tokens), now, horizon);
        parts.divide(asked, tokens, spare);
    }
    const auto& [all, least, cpu_token, disk_token, near] = prices;
    const Column<double> fixed(std::get<0>(lines), false, rows), per_token(std::get<1>(lines), false, rows),
        shares(std::get<2>(lines), false, rows);
    const CostLines costs{fixed.data(), per_token.data(), shares.data(), all, least, cpu_token, disk_token, near};
    const std::vector<u32> lowest = cheapest_rows(costs, tokens, found.transfers, parts, excluded);
    nb::dict transfers, by_events;
    for (const auto& [row, outside] : found.transfers) transfers[nb::int_(row)] = nb::make_tuple(outside.first, outside.second);
    for (const auto& [row, before] : found.by_events) by_events[nb::int_(row)] = before;
    return nb::make_tuple(
        lowest, transfers, by_events, found.raised, found.left, parts.depths, parts.others, made);
}

// Return the number of equal bytes at the start of two memory areas of `size` bytes.
std::size_t common_bytes(const char* one, const char* other, std::size_t size) {
    std::size_t at = 0;
    for (const std::size_t step : {std::size_t{4096}, std::size_t{64}})
        for (; size - at >= step && std::memcmp(one + at, other + at, step) == 0; at += step) {}
    while (at < size && one[at] == other[at]) ++at;
    return at;
}

std::size_t common(nb::handle one, nb::handle other) {
    PyObject *first = one.ptr(), *second = other.ptr();
    if (PyBytes_Check(first) && PyBytes_Check(second)) {
        const auto size = std::min(PyBytes_GET_SIZE(first), PyBytes_GET_SIZE(second));
        return common_bytes(PyBytes_AS_STRING(first), PyBytes_AS_STRING(second), static_cast<std::size_t>(size));
    }
    if (!PyUnicode_Check(first) || !PyUnicode_Check(second)) throw nb::type_error("two of str, or two of bytes");
    const auto size = static_cast<std::size_t>(std::min(PyUnicode_GET_LENGTH(first), PyUnicode_GET_LENGTH(second)));
    const int kind = PyUnicode_KIND(first);
    if (kind == PyUnicode_KIND(second)) {
        const auto* bytes = static_cast<const char*>(PyUnicode_DATA(first));
        return common_bytes(bytes, static_cast<const char*>(PyUnicode_DATA(second)), size * kind) / kind;
    }
    std::size_t at = 0;
    while (at < size && PyUnicode_READ_CHAR(first, at) == PyUnicode_READ_CHAR(second, at)) ++at;
    return at;
}

// Return the byte positions of a token in a packed prompt, from byte `start` on.
std::vector<std::size_t> token_places(const nb::bytes& tokens, u32 token, std::size_t start) {
    std::vector<std::size_t> places;
    const auto* bytes = reinterpret_cast<const u8*>(tokens.c_str());
    for (std::size_t at = start; at + sizeof(u32) <= tokens.size(); at += sizeof(u32))
        if (xxh3::read32(bytes + at) == token) places.push_back(at);
    return places;
}

}  // namespace

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // an index may live until the process ends
    using Release = nb::call_guard<nb::gil_scoped_release>;
    module.def("xxh3_64", [](const nb::bytes& bytes, u64 seed) { return xxh3::hash(bytes.c_str(), bytes.size(), seed); });
    module.def("prefix_hashes", &prefix_hashes);
    module.def("common", &common);
    module.def("token_places", &token_places);
    module.def("packed_numbers", [](const nb::bytes& json) -> nb::object {
        std::optional<std::string> packed;
        {
            const std::string_view bytes = view(json);
            const nb::gil_scoped_release others_run;
            packed = packed_numbers(bytes);
        }
        return packed ? nb::object(as_bytes(*packed)) : nb::none();
    });
    module.def("numbers_json", &numbers_json);
    module.def("choose", &choose);
    module.def("choose_target", &choose_target);
    module.def("holders", &holders_of);
    module.def("highest", &highest_of);
    nb::class_<JsonCheck>(module, "JsonCheck")
        .def(nb::init<std::vector<std::string>, std::vector<std::string>, u64, u64, u64, std::vector<std::string>>())
        .def("chat", &chat)
        .def("named", &named);
    module.def("json_outline", &json_outline);
    nb::class_<PoolBlocks>(module, "PoolBlocks")
        .def(
            "__init__",
            [](PoolBlocks* blocks, u32 limit, const std::vector<std::string>& media) {
                new (blocks) PoolBlocks(limit, media, std::random_device()());
            })
        .def("learn", &learn)
        .def("apply", [](PoolBlocks& blocks, const nb::bytes& changes) {
            const std::string_view bytes = view(changes);
            const nb::gil_scoped_release others_run;
            blocks.apply(bytes);
        })
        .def("clear", &PoolBlocks::clear, Release())
        .def("match", &match_pool)
        .def("stored", &stored_in_pool)
        .def("sizes", [](PoolBlocks& blocks) {
            const PoolBlocks::Sizes sizes = blocks.sizes();
            return nb::make_tuple(sizes.chain, sizes.objects, sizes.bytes, sizes.replaced);
        });
    nb::class_<SharedPrefixes>(module, "SharedPrefixes")
        .def(nb::init<>())
        .def("add", &SharedPrefixes::add)
        .def("remove", &SharedPrefixes::remove)
        .def("chunks", &SharedPrefixes::chunks)
        .def("parent", &SharedPrefixes::parent)
        .def("end", &SharedPrefixes::end)
        .def("length", &SharedPrefixes::length)
        .def("count", &SharedPrefixes::count)
        .def(
            "hold",
            [](SharedPrefixes& prefixes, u32 holder, nb::handle hashes) {
                return prefixes.hold(holder, hashes_of(Column<u64>(hashes, false)));
            })
        .def("hold_edge", &SharedPrefixes::hold_edge)
        .def("release", &SharedPrefixes::release)
        .def("split", &SharedPrefixes::split)
        .def("longest", &longest)
        .def(
            "resumable",
            [](SharedPrefixes& prefixes, u32 holder, nb::handle hashes, u32 window) {
                return prefixes.resumable(holder, hashes_of(Column<u64>(hashes, false)), window);
            })
        .def(
            "longest_of",
            [](SharedPrefixes& prefixes, u32 holder, nb::handle hashes) {
                return prefixes.longest_of(holder, hashes_of(Column<u64>(hashes, false)));
            })
        .def("size", &SharedPrefixes::size)
        .def("is_sound", &SharedPrefixes::is_sound);
    nb::class_<Index>(module, "Index")
        .def(nb::init<std::string, std::size_t, u64>())
        .def("add", &Index::add, nb::arg("model"), nb::arg("tenant"), nb::arg("adapter").none(), nb::arg("capacity").none())
        .def("attach", &Index::attach, Release())
        .def("apply", &apply, nb::arg("target"), nb::arg("payload"), nb::arg("known").none() = nb::none(),
             nb::arg("trusted") = false)
        .def("clear", &Index::clear, Release())
        .def("drop", &Index::drop, Release())
        .def("match", &match, nb::arg("root"), nb::arg("block_size"), nb::arg("tokens"), nb::arg("known"), nb::arg("blocks"),
             nb::arg("tier") = kEveryTier)
        .def("match_rows", &match_rows)
        .def("match_hashes", &match_hashes)
        .def(
            "dump",
            [](Index& index, u32 number) {
                std::string bytes;
                {
                    const nb::gil_scoped_release others_run;
                    bytes = index.dump(number);
                }
                return as_bytes(bytes);
            })
        .def(
            "restore",
            [](Index& index, u32 number, const nb::bytes& dump, const std::vector<u64>& block_sizes) {
                const std::string_view bytes = view(dump);
                const nb::gil_scoped_release others_run;
                return index.restore(number, bytes, block_sizes);
            })
        .def("status", &status)
        .def("kept", &kept)
        .def("sweep", &Index::sweep, Release())
        .def("runs", &Index::runs, Release())
        .def("is_sound", &Index::is_sound, Release());
    nb::class_<LiveReader>(module, "LiveReader")
        .def(
            "__init__",
            [](LiveReader* reader, const std::vector<std::uintptr_t>& functions, Index& index, int others) {
                new (reader) LiveReader(zmq_of(functions), index, others);
            },
            nb::keep_alive<1, 3>())
        .def("follow", [](LiveReader& reader, int fd, std::uintptr_t socket) { reader.follow(fd, reinterpret_cast<void*>(socket)); })
        .def("leave", &LiveReader::leave)
        .def("look_again", &LiveReader::look_again)
        .def("expect", &LiveReader::expect)
        .def("expect_nothing", &LiveReader::expect_nothing)
        .def("read", [](LiveReader& reader, double seconds) { return static_cast<int>(reader.read(seconds)); }, Release())
        .def("has_unreported", &LiveReader::has_unreported)
        .def("rest", &LiveReader::rest)
        .def("applied", &applied_runs)
        .def("received", &received)
        .def("messages", &messages)
        .def("address", &LiveReader::address)
        .def("apply", &apply_received);
}
