// The owner partitions of single elements, and digests, as Python classes and functions; see bind.cpp.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <variant>

#include "arrays.hpp"
#include "bind.hpp"
#include "digest.hpp"
#include "elements.hpp"
#include "hashing.hpp"
#include "hierarchy.hpp"

using namespace nanobind::literals;

namespace gradsync {
namespace {

Hash hash_of(uint64_t owners, uint64_t key) {
    check_owners(owners);
    return {key, owners};
}

// One value, or with ndim 2 a row of values, for each of `count` elements.
template <typename A> void check_values(const char *what, const A &array, size_t count, size_t ndim, size_t dim) {
    if (ndim != 2) return check_flat(what, array, count);
    rows_of<std::conditional_t<std::is_same_v<A, Array>, char, const char>>(what, array, count, dim);
    if (!is_contiguous(array)) refuse_kind(what, "contiguous", array);
}

// What a partition writes: per owner the places of its elements, and their values.
template <typename Place> struct Outputs {
    std::vector<Place *> places;
    std::vector<void *> values;
    size_t value_bytes;
};

template <typename Place>
Outputs<Place> outputs_of(const Dealt &dealt, const ReadOnlyArray &values, const char *what,
                          const std::vector<Array> &places, const std::vector<Array> &outs) {
    const std::vector<size_t> &counts = dealt.counts();
    check_floating("values", values);
    const size_t dim = values.ndim() == 2 ? values.shape(1) : 1;
    check_values("values", values, dealt.num_items(), values.ndim(), dim);
    if (places.size() != counts.size() || outs.size() != counts.size())
        refuse(std::string("one array of ") + what + " and one of values per owner are needed, got " +
               std::to_string(places.size()) + " and " + std::to_string(outs.size()) + " for " +
               std::to_string(counts.size()) + " owners");
    Outputs<Place> result{{}, {}, dim * values.itemsize()};
    for (size_t owner = 0; owner < counts.size(); ++owner) {
        if (places[owner].dtype() != nb::dtype<Place>())
            refuse_kind(what, name_of(nb::dtype<Place>()).c_str(), places[owner]);
        check_flat(what, places[owner], counts[owner]);
        check_same_dtype("outs", outs[owner], values);
        check_values("outs", outs[owner], counts[owner], values.ndim(), dim);
        result.places.push_back(static_cast<Place *>(places[owner].data()));
        result.values.push_back(outs[owner].data());
    }
    return result;
}

// A two-phase kernel together with the array it points into.
struct BoundRotatedPartition {
    ReadOnlyArray indices;
    std::optional<RotatedPartition> partition;

    BoundRotatedPartition(ReadOnlyArray array, uint64_t size, uint32_t owners, uint32_t key, int threads)
        : indices(std::move(array)) {
        check_threads(threads);
        const Indices items = indices_of(indices);
        const RotatedStripe stripe = stripe_of(owners, key);
        run_sorted("partition_rotated", "indices", size, [&] { partition.emplace(items, size, stripe, threads); });
    }

    void write(const ReadOnlyArray &values, const std::vector<Array> &positions, const std::vector<Array> &outs) const {
        const auto to = outputs_of<int32_t>(partition->dealt(), values, "positions", positions, outs);
        nb::gil_scoped_release unlocked;
        partition->write(values.data(), to.value_bytes, to.places, to.values);
    }
};

struct BoundHashedPartition {
    ReadOnlyArray indices;
    uint64_t size;
    std::optional<HashedPartition> partition;

    BoundHashedPartition(ReadOnlyArray array, uint64_t size, uint32_t owners, uint64_t key, int threads)
        : indices(std::move(array)), size(size) {
        check_threads(threads);
        const Indices items = indices_of(indices);
        const Hash owner_of = hash_of(owners, key);
        run_sorted("partition_hashed", "indices", size, [&] { partition.emplace(items, size, owner_of, threads); });
    }

    void write(const ReadOnlyArray &values, const std::vector<Array> &places, const std::vector<Array> &outs) const {
        const bool wide = !places.empty() && places[0].dtype() == nb::dtype<int64_t>();
        if (wide) return write_as<int64_t>(values, places, outs);
        for (const Array &array : places) with_index_out("indices_out", array, array.size(), size, [](auto *) {});
        write_as<int32_t>(values, places, outs);
    }

    template <typename Index>
    void write_as(const ReadOnlyArray &values, const std::vector<Array> &places, const std::vector<Array> &outs) const {
        const auto to = outputs_of<Index>(partition->dealt(), values, "indices_out", places, outs);
        nb::gil_scoped_release unlocked;
        partition->write(values.data(), to.value_bytes, to.places, to.values);
    }
};

struct BoundOwnedByHash {
    uint64_t size;
    std::optional<OwnedByHash> owned;

    BoundOwnedByHash(uint64_t size, uint32_t owners, uint64_t key, int threads) : size(size) {
        check_threads(threads);
        const Hash owner_of = hash_of(owners, key);
        nb::gil_scoped_release unlocked;
        owned.emplace(size, owner_of, threads);
    }

    void write(const std::vector<Array> &lists) const {
        if (lists[0].dtype() == nb::dtype<int64_t>()) write_as<int64_t>(lists);
        else write_as<int32_t>(lists);
    }

    template <typename Index> void write_as(const std::vector<Array> &lists) const {
        std::vector<Index *> to;
        for (size_t owner = 0; owner < owned->counts().size(); ++owner) {
            if (lists.at(owner).dtype() != nb::dtype<Index>()) refuse_kind("lists", "of one dtype", lists[owner]);
            with_index_out("lists", lists[owner], owned->counts()[owner], size,
                           [&](auto *list) { to.push_back(reinterpret_cast<Index *>(list)); });
        }
        nb::gil_scoped_release unlocked;
        owned->write(to);
    }
};

struct BoundHierarchy {
    std::variant<std::monostate, Hierarchy<int32_t>, Hierarchy<int64_t>> memory;

    BoundHierarchy(const ReadOnlyArray &indices, uint32_t owners, uint64_t key, uint64_t slots, uint64_t serial,
                   const std::vector<uint64_t> &rehash_keys, int threads) {
        check_threads(threads);
        const Hash owner_of = hash_of(owners, key);
        const Indices items = indices_of(indices);
        if (slots == 0 || rehash_keys.empty()) refuse("at least one slot and one rehash are needed");
        const HierarchyShape shape{slots, serial};
        run("hierarchical_hash", "limit", kMaxIndex, [&] {
            if (items.wide) memory.emplace<Hierarchy<int64_t>>(items, owner_of, shape, rehash_keys, threads);
            else memory.emplace<Hierarchy<int32_t>>(items, owner_of, shape, rehash_keys, threads);
        });
    }

    // body(the memory)
    template <typename Body> auto visit(Body body) const {
        if (const auto *wide = std::get_if<Hierarchy<int64_t>>(&memory)) return body(*wide);
        return body(std::get<Hierarchy<int32_t>>(memory));
    }

    void write(const std::vector<Array> &owned, const Array &overflow) const {
        visit([&](const auto &hierarchy) { write_as(hierarchy, owned, overflow); });
    }

    template <typename Index>
    static void write_as(const Hierarchy<Index> &hierarchy, const std::vector<Array> &owned, const Array &overflow) {
        const auto place = [](const char *what, const Array &array, size_t count) {
            if (array.dtype() != nb::dtype<Index>()) refuse_kind(what, name_of(nb::dtype<Index>()).c_str(), array);
            check_flat(what, array, count);
            return static_cast<Index *>(array.data());
        };
        std::vector<Index *> to;
        for (size_t owner = 0; owner < hierarchy.counts().size(); ++owner)
            to.push_back(place("owned", owned.at(owner), hierarchy.counts()[owner]));
        Index *const rest = place("overflow", overflow, hierarchy.num_overflow());
        nb::gil_scoped_release unlocked;
        hierarchy.write(to, rest);
    }
};

void hash_owners(const ReadOnlyArray &indices, uint32_t owners, uint64_t key, const Array &out, int threads) {
    check_threads(threads);
    const Hash owner_of = hash_of(owners, key);
    const Indices items = indices_of(indices);
    with_index_out("out", out, items.count, owners, [&](auto *to) {
        run("owners_by_hash", "limit", kMaxIndex, [&] { owners_by_hash(items, owner_of, to, threads); });
    });
}

void find_positions(const ReadOnlyArray &owned, const ReadOnlyArray &indices, const Array &out) {
    const Indices own = indices_of(owned), items = indices_of(indices);
    with_index_out("out", out, items.count, own.count, [&](auto *to) {
        run_sorted("positions_in", "indices", own.count, [&] { positions_in(own, items, to); });
    });
}

void write_rotated(uint32_t owner, const ReadOnlyArray &positions, uint32_t owners, uint32_t key, const Array &out,
                   int threads) {
    check_threads(threads);
    const RotatedStripe stripe = stripe_of(owners, key);
    if (owner >= owners) refuse("owner must be below " + std::to_string(owners) + ", got " + std::to_string(owner));
    if (positions.dtype() != nb::dtype<int32_t>()) refuse_kind("positions", "int32", positions);
    check_flat("positions", positions);
    Indices items = indices_of(positions);
    run("rotated_index", "positions", uint64_t{1} << 31, [&] { check_indices(items, 0, uint64_t{1} << 31); });
    const auto *from = static_cast<const int32_t *>(positions.data());
    with_index_out("out", out, items.count, rotated_bound(stripe, from, items.count), [&](auto *to) {
        nb::gil_scoped_release unlocked;
        rotated_indices(stripe, owner, from, items.count, to, threads);
    });
}

Digested digested_of(const ReadOnlyArray &x) {
    check_flat("xs", x);
    if (x.dtype() == nb::dtype<int64_t>()) return digested(static_cast<const int64_t *>(x.data()), x.shape(0));
    check_floating("xs", x);
    Digested tensor{};
    with_floating(x.dtype(), [&](auto element) {
        tensor = digested(static_cast<const decltype(element) *>(x.data()), x.shape(0));
    });
    return tensor;
}

void digest_into(const std::vector<ReadOnlyArray> &xs, const Array &out, int threads) {
    check_threads(threads);
    std::vector<Digested> tensors;
    for (const ReadOnlyArray &x : xs) tensors.push_back(digested_of(x));
    if (out.dtype() != nb::dtype<int64_t>()) refuse_kind("out", "int64", out);
    check_flat("out", out, xs.size());
    nb::gil_scoped_release unlocked;
    digest(tensors, static_cast<uint64_t *>(out.data()), threads);
}

}  // namespace

void bind_owners(nb::module_ &m) {
    nb::class_<BoundRotatedPartition>(m, "RotatedPartition")
        .def(nb::init<ReadOnlyArray, uint64_t, uint32_t, uint32_t, int>(), "indices"_a.noconvert(), "size"_a, "owners"_a,
             "key"_a, "threads"_a)
        .def_prop_ro("counts", [](const BoundRotatedPartition &self) { return self.partition->dealt().counts(); })
        .def("write", &BoundRotatedPartition::write, "values"_a.noconvert(), "positions"_a.noconvert(),
             "outs"_a.noconvert());
    nb::class_<BoundHashedPartition>(m, "HashedPartition")
        .def(nb::init<ReadOnlyArray, uint64_t, uint32_t, uint64_t, int>(), "indices"_a.noconvert(), "size"_a,
             "owners"_a, "key"_a, "threads"_a)
        .def_prop_ro("counts", [](const BoundHashedPartition &self) { return self.partition->dealt().counts(); })
        .def("write", &BoundHashedPartition::write, "values"_a.noconvert(), "indices_out"_a.noconvert(),
             "outs"_a.noconvert());
    nb::class_<BoundOwnedByHash>(m, "OwnedByHash")
        .def(nb::init<uint64_t, uint32_t, uint64_t, int>(), "size"_a, "owners"_a, "key"_a, "threads"_a)
        .def_prop_ro("counts", [](const BoundOwnedByHash &self) { return self.owned->counts(); })
        .def("write", &BoundOwnedByHash::write, "lists"_a.noconvert());
    using Keys = std::vector<uint64_t>;
    const auto of_memory = [](auto figure) {
        return [figure](const BoundHierarchy &self) { return self.visit(figure); };
    };
    nb::class_<BoundHierarchy>(m, "Hierarchy")
        .def(nb::init<const ReadOnlyArray &, uint32_t, uint64_t, uint64_t, uint64_t, const Keys &, int>(),
             "indices"_a.noconvert(), "owners"_a, "key"_a, "slots"_a, "serial"_a, "rehash_keys"_a, "threads"_a)
        .def_prop_ro("counts", of_memory([](auto &memory) { return memory.counts(); }))
        .def_prop_ro("num_serial", of_memory([](auto &memory) { return memory.num_serial(); }))
        .def_prop_ro("num_overflow", of_memory([](auto &memory) { return memory.num_overflow(); }))
        .def_prop_ro("nbytes", of_memory([](auto &memory) { return memory.nbytes(); }))
        .def("write", &BoundHierarchy::write, "owned"_a.noconvert(), "overflow"_a.noconvert());
    m.def("owners_by_hash", &hash_owners, "indices"_a.noconvert(), "owners"_a, "key"_a, "out"_a.noconvert(),
          "threads"_a);
    m.def("digest", &digest_into, "xs"_a.noconvert(), "out"_a.noconvert(), "threads"_a);
    m.def("positions_in", &find_positions, "owned"_a.noconvert(), "indices"_a.noconvert(), "out"_a.noconvert());
    m.def("rotated_index", &write_rotated, "owner"_a, "positions"_a.noconvert(), "owners"_a, "key"_a,
          "out"_a.noconvert(), "threads"_a);
}

}  // namespace gradsync
